"""Tokens: made, shown once, checked, limited, ended."""

from __future__ import annotations

from datetime import timedelta

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import SecretStr
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from service.access import keyring
from service.access.keyring import Keyring
from service.access.principals import ADMINISTRATOR
from service.access.rates import Rates, Streams, TooFast, TooManyStreams, neighbourhood
from service.access.tokens import BadToken, EndedToken, NewToken, TokenStore
from service.api.context import _caller
from service.app import create_app
from service.db import tables
from service.refusals import NotFound
from service.settings import Settings
from service.times import now
from tests.service.conftest import TOKEN, FakeConverter, eventually, running
from tests.service.test_api import assert_problem

READER = NewToken("a reader", ("jobs:read",), "administrator")


@pytest.fixture
def store(database):
    return TokenStore(database)


# --- the store, on both databases -----------------------------------------------------------------------------------
def test_a_token_opens_with_its_text_alone(store, database):
    made, text = store.create(NewToken("ci", ("jobs:write", "jobs:read"), "administrator", max_queued=7))
    found = store.verify(text)
    assert found == made == store.get(made.id)
    assert found.principal.scopes == {"jobs:read", "jobs:write"}
    assert (found.principal.id, found.principal.max_queued) == (made.id, 7)
    secret = text.split("_", 2)[2]
    assert len(secret) == 43
    with database.read() as connection:
        rows = connection.execute(select(tables.tokens)).mappings().all()
    assert secret not in str([dict(row) for row in rows])


def test_what_is_nearly_a_token_opens_nothing(store):
    _, text = store.create(READER)
    _, other = store.create(READER)
    swapped = text[: len("unshard_") + 26] + other[len("unshard_") + 26 :]
    flipped = text[:-2] + ("A" if text[-2] != "A" else "B") + text[-1]
    for wrong in (swapped, flipped, text + "A", text[:-1], text.upper(), "", "unshard__", "é" * 78, "\udcff", TOKEN):
        with pytest.raises(BadToken) as caught:
            store.verify(wrong)
        assert not isinstance(caught.value, EndedToken)


def test_an_ended_token_is_told_as_such_to_who_has_it_only(store):
    gone, gone_text = store.create(READER)
    late, late_text = store.create(NewToken("late", ("jobs:read",), "x", expires_at=now() + timedelta(hours=1)))
    assert store.verify(late_text).id == late.id
    store.change(late.id, {"expires_at": now() - timedelta(seconds=1)})
    revoked = store.revoke(gone.id)
    assert store.revoke(gone.id).revoked_at == revoked.revoked_at
    for text, how in ((gone_text, "was revoked"), (late_text, "expired at 2")):
        with pytest.raises(EndedToken, match=how):
            store.verify(text)
        with pytest.raises(BadToken) as caught:
            store.verify(text[:-3] + "AAA")
        assert type(caught.value) is BadToken


def test_tokens_come_in_pages_from_the_newest_on(store):
    made = [store.create(READER)[0].id for _ in range(3)]
    first = store.page(2)
    assert [token.id for token in first] == [made[2], made[1]]
    assert [token.id for token in store.page(2, first[-1].id)] == [made[0]]
    with pytest.raises(NotFound):
        store.get("token_0")
    with pytest.raises(NotFound):
        store.get("\x00")


def test_the_time_of_use_is_written_once_a_minute(store, database):
    made, _ = store.create(READER)
    store.used(made.id)
    first = store.get(made.id).last_used_at
    store.used(made.id)
    assert store.get(made.id).last_used_at == first
    with database.write() as connection:
        connection.execute(update(tables.tokens).values(last_used_at=first - timedelta(minutes=2)))
    store.used(made.id)
    assert store.get(made.id).last_used_at >= first


# --- the keyring ----------------------------------------------------------------------------------------------------
def test_a_verified_token_is_remembered_for_seconds_and_forgotten_with_a_change(store, monkeypatch):
    ring = Keyring(store, TOKEN)
    made, text = store.create(READER)
    assert ring.remembered(text) is None
    assert ring.verify(text).id == made.id
    assert ring.remembered(text) == made.principal
    assert ring.remembered(TOKEN) is ADMINISTRATOR
    assert ring.was_good(text)
    store.revoke(made.id)
    assert ring.remembered(text) is not None  # as another replica would, for CACHE_S
    ring.empty()
    assert ring.remembered(text) is None
    with pytest.raises(EndedToken):
        ring.verify(text)
    assert not ring.was_good(text)
    assert keyring.CACHE_S <= 5
    monkeypatch.setattr(keyring, "CACHE_S", -1.0)
    _, text = store.create(READER)
    ring.verify(text)
    assert ring.remembered(text) is None
    ring.close()


def test_a_token_that_is_revoked_while_it_is_looked_up_is_not_remembered(store):
    ring = Keyring(store, None)
    made, text = store.create(READER)
    look = store.verify

    class Slow(TokenStore):
        def verify(self, shown):
            found = look(shown)
            self.revoke(made.id)
            ring.empty()
            return found

    ring._tokens = Slow(store._database)
    assert ring.verify(text).id == made.id
    assert ring.remembered(text) is None
    ring.close()


def test_a_remembered_token_ends_in_time(store):
    ring = Keyring(store, None)
    made, text = store.create(NewToken("brief", ("jobs:read",), "x", expires_at=now() + timedelta(milliseconds=300)))
    assert ring.verify(text).id == made.id
    eventually(lambda: ring.remembered(text) is None, "it is over", within_s=3)
    ring.close()


# --- rates ----------------------------------------------------------------------------------------------------------
def test_a_bucket_holds_a_minutes_worth_and_fills_at_its_pace():
    moment = [0.0]
    rates = Rates(lambda: moment[0])
    for _ in range(60):
        rates.take("a", 60)
    with pytest.raises(TooFast) as caught:
        rates.take("a", 60)
    assert caught.value.wait_s == pytest.approx(1.0)
    rates.take("b", 60)
    moment[0] = 1.0
    rates.take("a", 60)
    with pytest.raises(TooFast):
        rates.take("a", 60)
    rates.give_back("a", 60)
    rates.take("a", 60)
    moment[0] = 10_000.0
    for _ in range(60):
        rates.take("a", 60)
    with pytest.raises(TooFast):
        rates.take("a", 60)


def test_buckets_of_many_addresses_stay_few(monkeypatch):
    monkeypatch.setattr("service.access.rates.MOST_BUCKETS", 10)
    rates = Rates()
    for number in range(100):
        rates.take(str(number), 1)
    assert len(rates._buckets) == 10


def test_streams_are_counted_by_caller():
    streams = Streams(2)
    streams.open("a")
    streams.open("a")
    with pytest.raises(TooManyStreams):
        streams.open("a")
    streams.open("b")
    streams.close("a")
    streams.open("a")


def test_a_machine_has_one_neighbourhood():
    assert neighbourhood("2001:db8::1") == neighbourhood("2001:db8::ffff:1") != neighbourhood("2001:db8:0:1::1")
    assert neighbourhood("::ffff:192.0.2.1") != neighbourhood("::ffff:192.0.2.2")
    assert neighbourhood("192.0.2.1") != neighbourhood("192.0.2.2")
    assert neighbourhood("unix") == "unix"


# --- over the wire --------------------------------------------------------------------------------------------------
@pytest.fixture
def guarded(settings, converter):
    with running(with_token(settings), converter, TOKEN) as started:
        yield started


def with_token(settings: Settings, **more) -> Settings:
    lists = {"allowed_sources": ("/",), "allowed_destinations": ("/",)}
    return settings.model_copy(update={"admin_token": SecretStr(TOKEN), **lists, **more})


def new_token(service, *scopes, **more):
    answer = service.http.post("/v1/tokens", json={"name": "of a test", "scopes": list(scopes), **more})
    assert answer.status_code == 201, answer.text
    return answer.json()


def as_token(service, token):
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    return httpx.Client(base_url=service.url, headers=headers, trust_env=False, timeout=15)


def test_a_token_is_shown_once(guarded):
    answer = guarded.http.post(
        "/v1/tokens", json={"name": "ci", "scopes": ["jobs:read", "jobs:read"], "max_queued": 3}
    )
    made = answer.json()
    assert answer.headers["location"] == f"/v1/tokens/{made['id']}"
    assert made["token"].startswith(f"unshard_{made['id'].removeprefix('token_')}_")
    assert (made["scopes"], made["created_by"], made["expires_at"]) == (["jobs:read"], "administrator", None)
    shown = guarded.http.get(answer.headers["location"]).json()
    assert shown == {name: value for name, value in made.items() if name != "token"}
    assert guarded.http.get("/v1/tokens").json() == {"items": [shown], "next_cursor": None}
    assert made["token"] not in guarded.http.get("/v1/tokens").text


def test_tokens_are_listed_page_by_page(guarded):
    made = [new_token(guarded, "jobs:read")["id"] for _ in range(3)]
    page = guarded.http.get("/v1/tokens", params={"limit": 2}).json()
    rest = guarded.http.get("/v1/tokens", params={"limit": 2, "cursor": page["next_cursor"]}).json()
    assert [item["id"] for item in page["items"] + rest["items"]] == made[::-1]
    assert_problem(guarded.http.get("/v1/tokens?cursor=am9i"), 422, "validation")


def test_a_token_does_what_its_scopes_say(guarded):
    body = {"source": "/in", "destination": "/out"}
    reads = {("GET", "/v1/jobs"), ("GET", "/v1/workers"), ("GET", "/v1/formats")}
    admin = {("GET", "/v1/tokens"), ("GET", "/v1/audit"), ("POST", "/v1/tokens")}
    with as_token(guarded, new_token(guarded, "jobs:read")["token"]) as http:
        assert all(http.request(*request).status_code == 200 for request in reads)
        refused = assert_problem(http.post("/v1/jobs", json=body), 403, "forbidden")
        assert refused["required_scope"] == "jobs:write"
        for method, path in admin:
            asked = {"name": "more", "scopes": ["admin"]} if method == "POST" else None
            assert (
                assert_problem(http.request(method, path, json=asked), 403, "forbidden")["required_scope"] == "admin"
            )
    with as_token(guarded, new_token(guarded, "jobs:write")["token"]) as http:
        assert http.post("/v1/jobs", json=body).status_code == 201
        assert_problem(http.get("/v1/jobs"), 403, "forbidden")
    with as_token(guarded, new_token(guarded, "admin")["token"]) as http:
        assert all(http.get(path).status_code == 200 for method, path in reads | admin if method == "GET")


def test_what_a_token_made_is_its_own(guarded):
    mine, yours = (new_token(guarded, "jobs:read", "jobs:write") for _ in range(2))
    with as_token(guarded, mine["token"]) as http, as_token(guarded, yours["token"]) as other:
        job = http.post("/v1/jobs", json={"source": "/in", "destination": "/out"}).json()
        assert job["owner"] == mine["id"]
        assert http.get(f"/v1/jobs/{job['id']}").status_code == 200
        assert_problem(other.get(f"/v1/jobs/{job['id']}"), 404, "not-found")
        assert_problem(other.post(f"/v1/jobs/{job['id']}:cancel"), 404, "not-found")
        assert other.get("/v1/jobs").json()["items"] == []
    assert guarded.client.job(job["id"])["owner"] == mine["id"]


def test_a_caller_is_told_who_it_is(guarded, idle):
    made = new_token(guarded, "webhooks", max_running=2, requests_per_minute=99, expires_in_s=3600)
    with as_token(guarded, made["token"]) as http:
        told = http.get("/v1/tokens/self").json()
    assert told == {
        "id": made["id"],
        "name": "of a test",
        "scopes": ["webhooks"],
        "max_running": 2,
        "max_queued": None,
        "requests_per_minute": 99,
        "max_streams": 20,
        "expires_at": made["expires_at"],
    }
    assert guarded.http.get("/v1/tokens/self").json()["id"] == "administrator"
    local = idle.http.get("/v1/tokens/self").json()
    assert (local["id"], local["scopes"], local["requests_per_minute"]) == ("local", ["admin"], None)


def test_a_revoked_token_ends_at_once_and_stays_in_the_list(guarded):
    made = new_token(guarded, "jobs:read")
    with as_token(guarded, made["token"]) as http:
        assert http.get("/v1/jobs").status_code == 200
        revoked = guarded.http.delete(f"/v1/tokens/{made['id']}").json()
        assert revoked["revoked_at"] is not None
        assert "was revoked" in assert_problem(http.get("/v1/jobs"), 401, "unauthenticated")["detail"]
    assert [item["id"] for item in guarded.http.get("/v1/tokens").json()["items"]] == [made["id"]]
    assert_problem(guarded.http.delete("/v1/tokens/token_0"), 404, "not-found")


def test_a_token_changes_its_end_and_its_limits_but_not_its_scopes(guarded):
    made = new_token(guarded, "jobs:read", max_queued=1, max_running=1)
    place = f"/v1/tokens/{made['id']}"
    changed = guarded.http.patch(place, json={"name": "other", "max_queued": None, "expires_in_s": 60}).json()
    assert (changed["name"], changed["max_queued"], changed["max_running"]) == ("other", None, 1)
    assert changed["expires_at"] is not None
    assert guarded.http.patch(place, json={"expires_at": None}).json()["expires_at"] is None
    assert guarded.http.patch(place, json={}).json()["name"] == "other"
    for wrong in ({"scopes": ["admin"]}, {"expires_at": "2020-01-01T00:00:00Z"}, {"max_queued": 0}):
        assert_problem(guarded.http.patch(place, json=wrong), 422, "validation")


def test_an_expired_token_is_told_apart_from_a_wrong_one(guarded):
    made = new_token(guarded, "jobs:read", expires_in_s=3600)
    guarded.context.guard.tokens.change(made["id"], {"expires_at": now() - timedelta(seconds=1)})
    with as_token(guarded, made["token"]) as http:
        assert "expired" in assert_problem(http.get("/v1/jobs"), 401, "unauthenticated")["detail"]
    with as_token(guarded, made["token"][:-2] + "AA") as http:
        assert "expired" not in assert_problem(http.get("/v1/jobs"), 401, "unauthenticated")["detail"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "", "scopes": ["admin"]},
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["root"]},
        {"name": "x\u0000", "scopes": ["admin"]},
        {"name": "x", "scopes": ["admin"], "expires_at": "2020-01-01T00:00:00Z"},
        {"name": "x", "scopes": ["admin"], "expires_at": "2100-01-01T00:00:00Z", "expires_in_s": 1},
        {"name": "x", "scopes": ["admin"], "expires_in_s": 0},
        {"name": "x", "scopes": ["admin"], "requests_per_minute": 0},
        {"name": "x", "scopes": ["admin"], "digest": "0"},
    ],
)
def test_a_wrong_token_request_is_refused(idle, wrong):
    assert_problem(idle.http.post("/v1/tokens", json=wrong), 422, "validation")


def test_the_administrators_token_works_while_the_database_is_away(guarded, monkeypatch):
    made = new_token(guarded, "jobs:read")
    guarded.context.guard.keyring.empty()

    def away(*_args, **_more):
        raise OperationalError("SELECT", {}, Exception("away"))

    monkeypatch.setattr(TokenStore, "verify", away)
    assert guarded.http.get("/v1/formats").status_code == 200
    with as_token(guarded, made["token"]) as http:
        answer = http.get("/v1/formats")
        assert_problem(answer, 503, "unavailable")
        assert answer.headers["retry-after"]


def test_where_no_token_is_asked_for_a_shown_one_still_counts(service):
    made = new_token(service, "jobs:read")
    with as_token(service, made["token"]) as http:
        assert http.get("/v1/tokens/self").json()["id"] == made["id"]
        assert_problem(http.post("/v1/jobs", json={"source": "/in", "destination": "/out"}), 403, "forbidden")
    with as_token(service, "unshard_wrong") as http:
        assert "send none" in assert_problem(http.get("/v1/jobs"), 401, "unauthenticated")["hint"]
    with as_token(service, None) as http:
        assert http.get("/v1/tokens/self").json()["id"] == "local"


def test_a_token_in_the_database_alone_opens_nothing_to_others():
    with pytest.raises(Exception, match="without a token"):
        Settings(host="0.0.0.0").check_may_listen()


def test_the_use_of_a_token_is_noted(guarded):
    made = new_token(guarded, "jobs:read")
    assert made["last_used_at"] is None
    with as_token(guarded, made["token"]) as http:
        http.get("/v1/jobs")
    place = f"/v1/tokens/{made['id']}"
    eventually(lambda: guarded.http.get(place).json()["last_used_at"], "the time of use")


def test_too_many_requests_are_told_when_to_come_again(guarded):
    made = new_token(guarded, "jobs:read", requests_per_minute=3)
    with as_token(guarded, made["token"]) as http:
        answers = [http.get("/v1/jobs") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        told = assert_problem(answers[-1], 429, "rate-limited")
        assert 1 <= told["retry_after_s"] <= 20
        assert answers[-1].headers["retry-after"] == str(told["retry_after_s"])
    assert guarded.http.get("/v1/jobs").status_code == 200


def test_the_services_own_limit_is_for_tokens_without_one(settings, converter):
    with running(with_token(settings, requests_per_minute=2), converter, TOKEN) as service:
        assert [service.http.get("/v1/jobs").status_code for _ in range(3)] == [200, 200, 429]
    free = settings.model_copy(update={"requests_per_minute": 2})
    with running(free, converter) as service:
        assert [service.http.get("/v1/jobs").status_code for _ in range(5)] == [200] * 5


def test_guessing_is_slow_and_locks_nobody_out(settings, converter):
    with running(with_token(settings, failed_logins_per_minute=3), converter, TOKEN) as service:
        made, later = new_token(service, "jobs:read"), new_token(service, "jobs:read")
        with as_token(service, made["token"]) as known:
            assert known.get("/v1/jobs").status_code == 200
            service.context.guard.keyring._verified.clear()
            guesses = []
            for number in range(6):
                with as_token(service, f"guess-{number}") as http:
                    guesses.append(http.get("/v1/jobs"))
            assert [answer.status_code for answer in guesses] == [401, 401, 401, 429, 429, 429]
            assert guesses[-1].headers["retry-after"]
            assert known.get("/v1/jobs").status_code == 200
            with as_token(service, later["token"]) as http:
                assert http.get("/v1/jobs").status_code == 429
            assert service.http.get("/v1/jobs").status_code == 200
        rows = service.http.get("/v1/audit", params={"action": "authentication"}).json()["items"]
        assert len(rows) == 3
        with as_token(service, None) as http:
            assert_problem(http.get("/v1/jobs"), 401, "unauthenticated")


def test_streams_of_a_token_are_limited(settings, converter):
    converter.gate.clear()
    with running(with_token(settings, max_streams=2), converter, TOKEN) as service:
        job = service.client.submit("/in", "/out")
        accept = {"Accept": "text/event-stream"}
        path = f"/v1/jobs/{job['id']}/events"
        with service.http.stream("GET", path, headers=accept) as one:
            lines = [one.iter_lines()]
            next(lines[0])
            with service.http.stream("GET", path, headers=accept) as two:
                lines.append(two.iter_lines())
                next(lines[1])
                answer = service.http.get(path, headers=accept)
                assert_problem(answer, 429, "too-many-streams")
                assert answer.headers["retry-after"]
                assert service.http.get(path).status_code == 200

        def third():
            with service.http.stream("GET", path, headers=accept) as again:
                return again.status_code == 200

        eventually(third, "the places are free again")
        converter.gate.set()


# --- every route ----------------------------------------------------------------------------------------------------
def test_every_route_of_the_api_asks_for_a_scope():
    open_to_all = {"/v1/docs", "/v1/openapi.json"}
    without_scope = {"/v1/tokens/self"}
    app = create_app(Settings(), run_conversion=FakeConverter())
    seen = 0
    for route in all_routes(app):
        path = getattr(route, "path", "")
        if not path.startswith("/v1") or path in open_to_all:
            continue
        assert isinstance(route, APIRoute), path
        asked = [needed for needed in flattened(route.dependant) if needed.call is _caller]
        assert asked, f"{path} asks for no caller"
        scopes = {scope for needed in asked for scope in needed.own_oauth_scopes or ()}
        assert bool(scopes) == (path not in without_scope), path
        changes = route.methods - {"GET", "HEAD"}
        asks_only = path in ("/v1/inspect", "/v1/compare")  # with bodies that no address could hold
        assert not changes or scopes != {"jobs:read"} or asks_only, f"{path} changes something"
        seen += 1
    assert seen > 20


def all_routes(router):
    """Routes, those of included routers as well, which FastAPI keeps behind an object of its own."""
    for route in router.routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from all_routes(included)


def flattened(dependant):
    yield dependant
    for below in dependant.dependencies:
        yield from flattened(below)


def test_the_text_of_a_token_is_in_no_object_that_is_printed(store):
    made, text = store.create(READER)
    secret = text[-43:]
    assert secret not in f"{made!r} {made} {store!r} {made.principal!r}"
