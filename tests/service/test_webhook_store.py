"""The outbox, claims and the log of deliveries, on both databases."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
from sqlalchemy import event, func, insert, select, update

from service.db.tables import jobs, tokens, webhook_deliveries, webhooks
from service.ids import new_id
from service.jobs.leases import Leases
from service.jobs.records import NewJob, append_event, now
from service.jobs.store import JobStore, insert_jobs
from service.refusals import NotFound, StateRefused, TooMany
from service.webhooks import claims as rules
from service.webhooks.claims import DELIVERED, FAILED, RETRIED, Claims
from service.webhooks.outbox import EVENT_TYPES, MOST_BODY_BYTES, Happening, encoded, enqueue, fitted, hears
from service.webhooks.sending import Outcome
from service.webhooks.store import (
    MOST_PER_OWNER,
    NewWebhook,
    WebhookStore,
)

ARRIVED = Outcome(200, None)
REFUSED = Outcome(500, "answered 500")
GONE = Outcome(410, "answered 410")


@pytest.fixture
def store(database):
    return WebhookStore(database)


@pytest.fixture
def claims(database):
    return Claims(database)


def hook(store, owner="anna", events=("*",), **given):
    return store.create(NewWebhook(owner, "https://hooks.example/x", list(events), **given))


def tell(database, owner="anna", kind="batch.completed"):
    with database.write() as connection:
        return enqueue(connection, owner, kind, {"id": "batch_1"})


def log_of(store, webhook, *states):
    return store.deliveries(webhook, states, 100)


def make_due(database):
    with database.write() as connection:
        connection.execute(update(webhook_deliveries).values(next_attempt_at=now() - timedelta(seconds=1)))


def claimed(claims, webhook):
    [claim] = claims.claim(webhook.id, 5)
    return claim


def new_job(database, owner="anna", destination="/out", **given):
    return JobStore(database).create(NewJob("/in", destination, {}, {"run": "7"}, owner=owner, **given))


def lease(database):
    found = Leases(database, "tester").claim()
    assert found is not None
    return Leases(database, "tester"), found


def test_what_a_job_does_is_told_to_who_hears_it(database, store):
    mine = hook(store)
    ends = hook(store, events=["job.succeeded", "job.failed"])
    others = hook(store, owner="ben")
    everyone = hook(store, owner="ben", everyone=True)
    job = new_job(database)
    leases, taken = lease(database)
    leases.advance(taken, "running", {"kept_files": []})
    leases.note(taken, "job.progress", {"bytes_done": 1})
    leases.note(taken, "job.warned", {"message": "all zeros"}, warnings=["all zeros"])
    leases.finish(taken, "succeeded", {"location": "/out"}, result={"location": "/out"})
    told = ["job.created", "job.running", "job.warned", "job.succeeded"]
    for webhook, expected in ((mine, told), (ends, told[-1:]), (others, []), (everyone, told)):
        assert [item.event_type for item in reversed(log_of(store, webhook))] == expected
    created, running, warned, done = (item.body for item in reversed(log_of(store, mine)))
    assert created["data"]["state"] == "queued"
    assert (running["data"]["state"], running["data"]["seq"]) == ("running", 3)
    assert warned["data"]["detail"] == {"message": "all zeros"}
    assert done["data"] == {
        "job_id": job.id,
        "seq": 6,
        "state": "succeeded",
        "source": "/in",
        "destination": "/out",
        "labels": {"run": "7"},
        "attempt": 1,
        "batch_id": None,
        "watch_id": None,
        "warnings": ["all zeros"],
        "error": None,
        "result": {"location": "/out"},
        "detail": {},
        "links": {"self": f"/v1/jobs/{job.id}"},
    }
    assert done["type"] == "job.succeeded"
    assert done["timestamp"].endswith("Z")


def test_a_failure_and_its_retry_are_told(database, store):
    mine = hook(store, events=["job.failed", "job.requeued", "job.cancelled"])
    job = new_job(database)
    leases, taken = lease(database)
    error = {"kind": "input", "type": "corrupt-file", "message": "damaged"}
    leases.finish(taken, "failed", error, error=error)
    JobStore(database).retry(job.id)
    JobStore(database).cancel(job.id)
    failed, requeued, cancelled = (item.body["data"] for item in reversed(log_of(store, mine)))
    assert (failed["state"], failed["error"]) == ("failed", error)
    assert (requeued["state"], requeued["detail"]["reason"]) == ("queued", "retry")
    assert cancelled["state"] == "cancelled"


def test_nothing_is_told_of_what_was_rolled_back(database, store):
    mine = hook(store)
    job = new_job(database)
    with suppress(ZeroDivisionError), database.write() as connection:
        append_event(connection, job.id, "job.running", {})
        _ = 1 / 0
    assert [item.event_type for item in log_of(store, mine)] == ["job.created"]


def test_jobs_made_together_are_told_each_to_its_owner(database, store):
    anna, ben = hook(store), hook(store, owner="ben")
    with database.write() as connection:
        wanted = [NewJob("/in", f"/out/{n}", {}, {}, owner=("anna", "ben")[n % 2]) for n in range(5)]
        ids = insert_jobs(connection, wanted)
    assert [item.job_id for item in reversed(log_of(store, anna))] == ids[::2]
    assert [item.job_id for item in reversed(log_of(store, ben))] == ids[1::2]


def test_without_webhooks_an_event_costs_one_query_more_and_progress_none(database):
    job = new_job(database)
    counted = []
    event.listen(database._engine, "before_cursor_execute", lambda *told: counted.append(told[2]))
    for kind, expected in (("job.running", 1), ("job.progress", 0), ("job.planned", 0)):
        counted.clear()
        with database.write() as connection:
            append_event(connection, job.id, kind, {})
        assert len([text for text in counted if "webhook" in text]) == expected


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_patterns_cover_types(kind):
    noun = kind.split(".")[0]
    assert hears(["*"], kind)
    assert hears([f"{noun}.*"], kind)
    assert hears(["job.none", kind], kind)
    assert not hears([], kind)
    assert not hears(["other.*", "job.none"], kind)


def test_a_body_that_is_too_large_loses_its_long_lists_first():
    files = [{"path": f"model-{n:05}.safetensors", "digest": "x" * 40} for n in range(5000)]
    body = Happening("anna", "job.succeeded", now(), {"source": "/in/" + "a" * 500, "result": {"files": files}}).body
    assert len(encoded(body)) <= MOST_BODY_BYTES
    assert body["truncated"] is True
    assert body["data"]["result"]["files"] == files[:256]
    assert body["data"]["source"] == "/in/" + "a" * 500


def test_whatever_is_in_it_a_body_is_small_enough():
    labels = {f"label-{n}": "ü" * 255 for n in range(32)}
    data = {"source": "ä" * 4096, "destination": "ö" * 4096, "labels": labels, "error": {"message": "x" * 10**6}}
    body = fitted({"type": "job.failed", "data": data})
    assert len(encoded(body)) <= MOST_BODY_BYTES
    assert json.loads(encoded(body))["data"]["error"]["message"].startswith("xxx")


def test_a_small_body_is_sent_as_it_is():
    body = {"type": "job.failed", "data": {"message": "a lone surrogate: \udc80"}}
    assert fitted(body) is body
    assert json.loads(encoded(body)) == body


def test_a_delivery_is_claimed_once_and_recorded(database, store, claims):
    mine = hook(store)
    assert tell(database) == 1
    assert claims.due() == [mine.id]
    claim = claimed(claims, mine)
    assert (claims.due(), claims.claim(mine.id, 5)) == ([], [])
    assert claims.record(claim, ARRIVED) == DELIVERED
    [done] = log_of(store, mine)
    assert (done.state, done.attempts, done.response_status, done.next_attempt_at) == ("delivered", 1, 200, None)


def test_several_processes_share_the_deliveries(database, store):
    mine = hook(store)
    for _ in range(40):
        tell(database)
    taken, start = [], threading.Barrier(4)

    def work():
        own = Claims(database)
        start.wait()
        while got := own.claim(mine.id, 3):
            taken.extend(claim.delivery_id for claim in got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(set(taken))) == (40, 40)


def test_a_delivery_whose_sender_died_comes_again_under_its_id(database, store, claims):
    mine = hook(store)
    tell(database)
    lost = claimed(claims, mine)
    make_due(database)
    again = claimed(claims, mine)
    assert (again.delivery_id, again.attempt) == (lost.delivery_id, 2)
    assert claims.record(lost, REFUSED) is None, "too late: somebody else sends it"
    assert claims.record(again, ARRIVED) == DELIVERED
    assert claims.record(again, REFUSED) is None


def test_a_failed_attempt_is_made_again_later_and_later_over_two_days(database, store, claims):
    mine = hook(store)
    tell(database)
    waited = []
    for _ in rules.RETRY_DELAYS_S:
        make_due(database)
        assert claims.record(claimed(claims, mine), REFUSED) == RETRIED
        [waiting] = log_of(store, mine, "pending")
        assert (waiting.response_status, waiting.error) == (500, "answered 500")
        waited.append((waiting.next_attempt_at - now()).total_seconds())
    for found, planned in zip(waited, rules.RETRY_DELAYS_S, strict=True):
        assert planned - 2 < found < planned * (1 + rules.JITTER) + 2
    assert 40 * 3600 < sum(rules.RETRY_DELAYS_S) < 56 * 3600
    make_due(database)
    assert claims.record(claimed(claims, mine), REFUSED) == FAILED
    [given_up] = log_of(store, mine, "failed")
    assert (given_up.attempts, given_up.next_attempt_at) == (len(rules.RETRY_DELAYS_S) + 1, None)
    assert store.get(mine.id).state == "active"


def test_a_receiver_that_asks_for_time_gets_it_but_no_attempt_comes_early(database, store, claims):
    mine = hook(store)
    for asked, least in ((7200.0, 7190), (1.0, 4)):
        tell(database)
        claims.record(claimed(claims, mine), Outcome(429, "answered 429", asked))
        newest = log_of(store, mine)[0]
        assert (newest.next_attempt_at - now()).total_seconds() > least


def test_a_webhook_that_refuses_again_and_again_is_disabled_and_can_be_enabled(database, store, claims):
    mine = hook(store)
    for number in range(rules.MOST_REFUSALS):
        assert store.get(mine.id).state == "active", number
        tell(database)
        claims.record(claims.claim(mine.id, 9)[-1], GONE)
    stopped = store.get(mine.id)
    assert (stopped.state, stopped.disabled_reason) == ("disabled", "refused 5 times in a row, at last: answered 410")
    assert tell(database) == 0, "nothing is told to a disabled webhook"
    make_due(database)
    assert (claims.due(), claims.claim(mine.id, 9)) == ([], [])
    with pytest.raises(StateRefused):
        store.redeliver(mine, log_of(store, mine)[0].id)
    again = store.change(mine.id, {"state": "active"})
    assert (again.state, again.disabled_reason) == ("active", None)
    assert len(claims.claim(mine.id, 9)) == rules.MOST_REFUSALS, "what waits is sent then"


def test_an_arrival_in_between_starts_the_count_of_refusals_anew(database, store, claims):
    mine = hook(store)
    for outcome in [GONE] * (rules.MOST_REFUSALS - 1) + [ARRIVED] + [GONE] * (rules.MOST_REFUSALS - 1):
        tell(database)
        claims.record(claims.claim(mine.id, 9)[-1], outcome)
    assert store.get(mine.id).state == "active"


def test_deliveries_given_up_in_a_row_disable_a_webhook(database, store, claims):
    mine = hook(store)
    for _ in range(rules.MOST_REFUSALS):
        tell(database)
    with database.write() as connection:
        connection.execute(update(webhook_deliveries).values(attempts=len(rules.RETRY_DELAYS_S)))
    results = [claims.record(claim, REFUSED) for claim in claims.claim(mine.id, 9)]
    assert results == [FAILED] * rules.MOST_REFUSALS
    assert "answered 500" in store.get(mine.id).disabled_reason


def test_a_webhook_of_a_revoked_token_is_sent_nothing_more(database, store, claims):
    revoked, expired, good = new_id("token"), new_id("token"), new_id("token")
    hooks = [hook(store, owner=owner) for owner in (revoked, expired, good)]
    gone = now() - timedelta(seconds=1)
    with database.write() as connection:
        for token, values in ((revoked, {"revoked_at": gone}), (expired, {"expires_at": gone}), (good, {})):
            row = {"id": token, "name": "t", "digest": token, "scopes": [], "created_by": "local", "created_at": now()}
            connection.execute(insert(tokens).values(**row, **values))
    for token in (revoked, expired, good):
        tell(database, owner=token)
    assert [len(claims.claim(webhook.id, 5)) for webhook in hooks] == [0, 0, 1]
    assert [store.get(webhook.id).state for webhook in hooks] == ["disabled", "disabled", "active"]


def test_a_delivery_can_be_sent_again_under_its_id(database, store, claims):
    mine = hook(store)
    tell(database)
    first = claimed(claims, mine)
    untouched = store.redeliver(mine, first.delivery_id)
    assert untouched.attempts == 1, "it is being sent at this moment"
    claims.record(first, ARRIVED)
    assert store.redeliver(mine, first.delivery_id).state == "pending"
    again = claimed(claims, mine)
    assert (again.delivery_id, again.attempt, again.body) == (first.delivery_id, 1, first.body)


def test_an_attempt_that_was_begun_too_often_without_an_end_is_given_up(database, store, claims):
    mine = hook(store)
    tell(database)
    with database.write() as connection:
        connection.execute(update(webhook_deliveries).values(attempts=len(rules.RETRY_DELAYS_S) + 1))
    spent = claimed(claims, mine)
    assert spent.is_spent
    assert claims.record(spent, Outcome(None, "never ended")) == FAILED


def test_two_secrets_are_valid_for_a_day_after_a_rotation(database, store):
    mine = hook(store)
    [old] = mine.secrets
    rotated = store.rotate_secret(mine.id)
    assert rotated.secrets[1:] == (old,)
    assert rotated.secrets[0] != old
    assert timedelta(hours=23) < rotated.previous_secret_until - now() <= timedelta(hours=24)
    with database.write() as connection:
        connection.execute(update(webhooks).values(previous_secret_until=now() - timedelta(seconds=1)))
    later = store.get(mine.id)
    assert (later.secrets, later.previous_secret_until) == (rotated.secrets[:1], None)


def test_a_webhook_is_there_for_its_owner_alone(store):
    mine = hook(store)
    assert [found.id for found in store.page("anna", 10)] == [mine.id]
    assert (store.page("ben", 10), len(store.page(None, 10))) == ([], 1)
    for ask in (store.get, store.rotate_secret, store.delete):
        with pytest.raises(NotFound):
            ask(mine.id, "ben")
    with pytest.raises(NotFound):
        store.change(mine.id, {"events": ["*"]}, "ben")
    for wrong in ("webhook_0", "x'; --", "webhook_\x00"):
        with pytest.raises(NotFound):
            store.get(wrong)
    for wrong in ("delivery_0", "x\x00"):
        with pytest.raises(NotFound):
            store.delivery(mine, wrong)


def test_an_owner_has_so_many_webhooks_and_no_more(store, monkeypatch):
    monkeypatch.setattr("service.webhooks.store.MOST_PER_OWNER", 2)
    hook(store)
    hook(store)
    with pytest.raises(TooMany):
        hook(store)
    hook(store, owner="ben")
    assert MOST_PER_OWNER > 2


def test_a_webhook_can_be_deleted_while_it_is_told_something(database, store, claims):
    """On a database with row locks neither side waits for good, and a job's own transaction does not fail."""
    for _ in range(5):
        mine, job = hook(store), new_job(database, destination=f"/out/{new_id('x')}")
        tell(database)
        claim = claims.claim(mine.id, 1)[0]
        failures, start = [], threading.Barrier(3)

        def attempt(act, failures=failures, start=start):
            start.wait()
            try:
                act()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault
                failures.append(error)

        def happen(job=job):
            with database.write() as connection:
                append_event(connection, job.id, "job.running", {})

        acts = (lambda m=mine: store.delete(m.id), lambda c=claim: claims.record(c, REFUSED), happen)
        threads = [threading.Thread(target=attempt, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
    with database.read() as connection:
        assert connection.execute(select(func.count()).select_from(webhook_deliveries)).scalar() == 0
        assert connection.execute(select(func.count()).select_from(jobs)).scalar() == 5


def test_deliveries_that_waited_too_long_are_dropped(database, store, claims, monkeypatch):
    mine = hook(store)
    tell(database)
    claims.record(claimed(claims, mine), ARRIVED)
    tell(database)
    assert claims.forget_old() == 0
    monkeypatch.setattr(rules, "KEPT", timedelta(seconds=-1))
    assert claims.forget_old() == 1
    assert [item.state for item in log_of(store, mine)] == ["delivered"]


def test_secrets_and_urls_stay_out_of_a_webhooks_name(store):
    mine = hook(store)
    assert mine.secrets[0] not in repr(mine)
    assert mine.url not in repr(mine)


def test_of_many_requests_at_once_no_more_are_taken_than_may_be(database, monkeypatch):
    monkeypatch.setattr("service.webhooks.store.MOST_PER_OWNER", 3)
    store = WebhookStore(database)

    def create(number: int) -> bool:
        try:
            store.create(NewWebhook("anna", f"https://example.com/{number}", ["*"]))
        except TooMany:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(16))) == 3
