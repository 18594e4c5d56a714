"""Image, compose file and manifests, checked without a container engine or a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from sqlalchemy import make_url

from service.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ROOT / "deploy" / "kubernetes"
REPLICATED = ROOT / "deploy" / "kubernetes-postgres"
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"
DEPLOYMENTS = [*(ROOT / "deploy").glob("*/*.yaml"), *(ROOT / "docker").glob("*.yaml"), ROOT / "deploy" / "README.md"]

Document = dict[str, Any]

# The fields of KubeRay's v1 API that we use. A misspelt one would be dropped by the API server without a word.
RAY_CLUSTER_FIELDS = {
    "rayVersion",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "authOptions",
    "headGroupSpec",
    "workerGroupSpecs",
}
AUTOSCALER_FIELDS = {"idleTimeoutSeconds", "resources", "upscalingMode", "version", "image", "env", "securityContext"}
HEAD_FIELDS = {"serviceType", "rayStartParams", "template"}
WORKER_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def documents() -> list[Document]:
    listed = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    return [found for name in listed for found in yaml.safe_load_all((MANIFESTS / name).read_text())]


def named(kind: str, name: str) -> Document:
    return next(d for d in documents() if d["kind"] == kind and d["metadata"]["name"] == name)


def head() -> Document:
    return named("RayCluster", "unshard")["spec"]["headGroupSpec"]


def worker_groups() -> list[Document]:
    return named("RayCluster", "unshard")["spec"]["workerGroupSpecs"]


def pods() -> dict[str, Document]:
    """Every pod template by a name of its own."""
    found = {"service": named("Deployment", "unshard")["spec"]["template"], "head": head()["template"]}
    return found | {group["groupName"]: group["template"] for group in worker_groups()}


def containers(pod: Document) -> list[Document]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def all_containers() -> list[Document]:
    return [container for pod in pods().values() for container in containers(pod)]


def walk(node: object) -> Iterator[Document]:
    """Every mapping below a node."""
    if isinstance(node, dict):
        yield node
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    for child in children:
        yield from walk(child)


def compose_services() -> dict[str, Document]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


# --- manifests ---------------------------------------------------------------------------------------------------


def test_every_manifest_is_listed_for_kustomize():
    listed = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in MANIFESTS.iterdir()}


def test_no_manifest_names_a_namespace():
    assert [d["metadata"]["name"] for d in documents() if "namespace" in d["metadata"]] == []


@pytest.mark.parametrize("document", documents(), ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_core_objects_match_kubernetes_schemas(document):
    if document["apiVersion"] == "ray.io/v1":
        pod_templates = [head()["template"], *(group["template"] for group in worker_groups())]
        checked = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "x"} | template["metadata"],
                "spec": template["spec"],
            }
            for template in pod_templates
        ]
    else:
        checked = [document]
    for each in checked:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_the_validator_catches_a_misspelt_field():
    wrong = named("Service", "unshard")
    wrong["spec"]["portz"] = wrong["spec"].pop("ports")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_the_ray_cluster_uses_known_fields_only():
    cluster = named("RayCluster", "unshard")
    assert cluster["apiVersion"] == "ray.io/v1"
    assert set(cluster["spec"]) <= RAY_CLUSTER_FIELDS
    assert set(cluster["spec"]["autoscalerOptions"]) <= AUTOSCALER_FIELDS
    assert set(head()) <= HEAD_FIELDS
    for group in worker_groups():
        assert set(group) <= WORKER_FIELDS
    for start_params in [head()["rayStartParams"], *(group["rayStartParams"] for group in worker_groups())]:
        assert all(isinstance(value, str) for value in start_params.values())


def test_the_head_does_no_work_and_workers_scale():
    assert head()["rayStartParams"]["num-cpus"] == "0"
    assert named("RayCluster", "unshard")["spec"]["enableInTreeAutoscaling"] is True
    for group in worker_groups():
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_ray_nodes_have_a_memory_request_equal_to_their_limit():
    for container in all_containers():
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        assert "cpu" in container["resources"]["requests"]


def test_manifests_and_constraints_name_the_same_ray():
    assert named("RayCluster", "unshard")["spec"]["rayVersion"] == pins()["ray"]


def test_token_authentication_is_on_everywhere_with_one_secret():
    auth = named("RayCluster", "unshard")["spec"]["authOptions"]
    assert auth == {"mode": "token", "secretName": "unshard-ray-token"}
    for container in containers(pods()["service"]):
        env = {entry["name"]: entry for entry in container["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": auth["secretName"], "key": "auth_token"}


def test_the_service_joins_the_cluster_by_its_head_service():
    address = f"{named('RayCluster', 'unshard')['metadata']['name']}-head-svc:6379"
    joining, serving = containers(pods()["service"])
    assert f"--address={address}" in joining["command"][-1]
    assert "--num-cpus=0" in joining["command"][-1]
    assert {"name": "RAY_ADDRESS", "value": address} in serving["env"]


def test_the_driver_shares_a_host_with_its_ray_node():
    pod = pods()["service"]
    assert pod["spec"]["shareProcessNamespace"] is True
    shared = [
        {m["name"] for m in c["volumeMounts"] if m["mountPath"] in {"/tmp", "/dev/shm"}} for c in containers(pod)
    ]
    assert shared == [{"tmp", "shm"}, {"tmp", "shm"}]


def test_sqlite_has_one_writer():
    deployment = named("Deployment", "unshard")["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}


def test_pods_run_unprivileged_on_a_read_only_root():
    for pod in pods().values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in all_containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_no_service_variables_pose_as_settings():
    # A Service called unshard would put UNSHARD_PORT=tcp://... into every pod.
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in pods().values())


def test_probes_ask_ports_that_exist():
    for container in all_containers():
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container.get(probe, {}).get("httpGet", {}).get("port") in {None, *ports}
    serving = containers(pods()["service"])[-1]
    assert serving["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert serving["readinessProbe"]["httpGet"]["path"] == "/readyz?exclude=ray"


def test_ray_nodes_bring_their_own_probes():
    # KubeRay's defaults call wget, which the image has not.
    for name, pod in pods().items():
        if name != "service":
            assert {"livenessProbe", "readinessProbe"} <= set(pod["spec"]["containers"][0])


def test_mounts_refer_to_volumes_and_volumes_to_objects():
    config_maps = {d["metadata"]["name"] for d in documents() if d["kind"] == "ConfigMap"}
    claims = {d["metadata"]["name"] for d in documents() if d["kind"] == "PersistentVolumeClaim"}
    for pod in pods().values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {m["name"] for c in containers(pod) for m in c["volumeMounts"]} == set(volumes)
        assert {v["configMap"]["name"] for v in volumes.values() if "configMap" in v} <= config_maps
        assert {
            v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v
        } <= claims


def test_selectors_match_the_pods_they_mean():
    labels = pods()["service"]["metadata"]["labels"].items()
    assert named("Deployment", "unshard")["spec"]["selector"]["matchLabels"].items() <= labels
    assert named("Service", "unshard")["spec"]["selector"].items() <= labels
    assert named("NetworkPolicy", "unshard-service")["spec"]["podSelector"]["matchLabels"].items() <= labels
    (port,) = named("Service", "unshard")["spec"]["ports"]
    assert port["targetPort"] in {p["name"] for p in pods()["service"]["spec"]["containers"][0]["ports"]}
    ray_labels = head()["template"]["metadata"]["labels"].items()
    assert not named("Service", "unshard")["spec"]["selector"].items() <= ray_labels


def test_only_the_cluster_and_the_service_reach_ray():
    policy = named("NetworkPolicy", "unshard-ray")["spec"]
    cluster = {"ray.io/cluster": named("RayCluster", "unshard")["metadata"]["name"]}  # KubeRay labels its pods so
    service = named("Deployment", "unshard")["spec"]["selector"]["matchLabels"]
    assert policy["podSelector"]["matchLabels"] == cluster
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    assert [peer["podSelector"]["matchLabels"] for peer in rule["from"]] == [cluster, service]


def test_everything_but_the_api_port_is_shut_on_the_service():
    api, nodes = named("NetworkPolicy", "unshard-service")["spec"]["ingress"]
    assert api == {"ports": [{"port": "http", "protocol": "TCP"}]}
    assert nodes == {"from": [{"podSelector": {"matchLabels": {"ray.io/cluster": "unshard"}}}]}


def test_no_manifest_holds_a_secret():
    assert [d["metadata"]["name"] for d in documents() if d["kind"] == "Secret"] == []
    for mapping in walk([*documents(), compose_services()]):
        if re.search("token|secret|password|key_id", str(mapping.get("name", "")).lower()) and "value" in mapping:
            assert mapping["value"] == "token", mapping


def test_the_example_profiles_are_commented_out_and_valid_when_not():
    text = named("ConfigMap", "unshard-profiles")["data"]["profiles.toml"]
    assert tomllib.loads(text) == {}
    profile = tomllib.loads(re.sub("^# ", "", text, flags=re.MULTILINE))["profiles"]["checkpoints"]
    assert {key for key in profile if "secret" in key} == {"secret_access_key_file"}


# --- several replicas --------------------------------------------------------------------------------------------


def merged(base: Any, patch: Any) -> Any:
    """What kustomize makes of a base and a strategic merge patch, as far as ours go; lists are merged by name."""
    if isinstance(patch, dict) and isinstance(base, dict):
        if patch.get("$patch") == "replace":
            return {key: value for key, value in patch.items() if key != "$patch"}
        both = {**base, **{key: merged(base.get(key), value) for key, value in patch.items()}}
        return {key: value for key, value in both.items() if value is not None}
    if isinstance(patch, list) and isinstance(base, list):
        new = {each["name"]: each for each in patch}
        kept = [merged(each, new.pop(each["name"], {})) for each in base]
        return [*new.values(), *kept]
    return patch


def replicated() -> dict[str, Document]:
    """The objects that the variant for PostgreSQL changes or adds, by their kind; None where one is taken away."""
    listed = yaml.safe_load((REPLICATED / "kustomization.yaml").read_text())
    assert listed["resources"][0] == "../kubernetes"
    patches = [yaml.safe_load((REPLICATED / patch["path"]).read_text()) for patch in listed["patches"]]
    bases = [named(patch["kind"], patch["metadata"]["name"]) for patch in patches]
    made = {
        patch["kind"]: None if patch.get("$patch") == "delete" else merged(base, patch)
        for base, patch in zip(bases, patches, strict=True)
    }
    added = [yaml.safe_load((REPLICATED / name).read_text()) for name in listed["resources"][1:]]
    return made | {each["kind"]: each for each in added}


def test_replicas_share_a_database_and_need_no_volume():
    made = replicated()
    deployment = made["Deployment"]["spec"]
    assert deployment["replicas"] > 1
    assert deployment["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    [database] = [e for e in containers(deployment["template"])[-1]["env"] if e["name"] == "UNSHARD_DATABASE_URL"]
    assert database == {
        "name": "UNSHARD_DATABASE_URL",
        "valueFrom": {"secretKeyRef": {"name": "unshard-database", "key": "url"}},
    }
    assert made["PersistentVolumeClaim"] is None
    assert not [volume for volume in deployment["template"]["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    assert "postgres" in re.search(r"pip install.*\.\[(.*?)\]", DOCKERFILE.read_text())[1]


def test_objects_of_several_replicas_match_kubernetes_schemas_and_each_other():
    made = {kind: document for kind, document in replicated().items() if document is not None}
    for document in made.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    budget = made["PodDisruptionBudget"]["spec"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    assert 0 < budget["minAvailable"] < made["Deployment"]["spec"]["replicas"]


def test_compose_with_postgres_waits_for_it_and_knows_its_password():
    services = yaml.safe_load((ROOT / "docker" / "compose.postgres.yaml").read_text())["services"]
    server, service = services["postgres"], services["service"]
    assert server["environment"]["POSTGRES_PASSWORD"].startswith("${UNSHARD_DATABASE_PASSWORD:?")
    url = make_url(service["environment"]["UNSHARD_DATABASE_URL"])
    assert (url.host, url.database, url.username) == ("postgres", "unshard", "unshard")
    assert (url.drivername, url.password) == ("postgresql+psycopg", "${UNSHARD_DATABASE_PASSWORD}")
    assert service["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert "ports" not in server


# --- image and compose -------------------------------------------------------------------------------------------


def test_one_image_everywhere():
    images = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["images"]
    assert [image["name"] for image in images] == ["unshard"]
    assert {c["image"] for c in all_containers()} == {s["image"] for s in compose_services().values()} == {"unshard"}


def test_kustomize_takes_the_tag_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (image,) = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["images"]
    assert image["newTag"] == project["version"]


def test_hadolint_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_image_and_manifests_agree_on_user_port_and_database():
    text = DOCKERFILE.read_text()
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert {pod["spec"]["securityContext"]["runAsUser"] for pod in pods().values()} == {10001}
    port = re.search(r"^EXPOSE (\d+)$", text, re.MULTILINE)[1]
    serving = containers(pods()["service"])[-1]
    assert serving["ports"] == [{"name": "http", "containerPort": int(port)}]
    assert serving["args"][-1] == port
    database = re.search(r"UNSHARD_DATABASE_URL=(\S+)", text)[1]
    assert {"name": "UNSHARD_DATABASE_URL", "value": database} in serving["env"]
    assert compose_services()["service"]["environment"]["UNSHARD_DATABASE_URL"] == database


def test_the_build_context_holds_what_the_image_copies_and_no_more():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {"pyproject.toml", "constraints.txt", "LICENSE", "README.md", "service", "workers"}


def test_compose_waits_for_health_and_publishes_the_api_on_loopback_only():
    services = compose_services()
    assert {name: s["depends_on"]["ray-head"]["condition"] for name, s in services.items() if "depends_on" in s} == {
        "ray-worker": "service_healthy",
        "service": "service_healthy",
    }
    assert [port for s in services.values() for port in s.get("ports", [])] == ["127.0.0.1:8000:8000"]
    assert all("shm_size" in services[name] for name in ("ray-head", "ray-worker"))


def test_compose_gives_every_process_the_token():
    for service in compose_services().values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")


def test_every_setting_of_the_service_in_a_deployment_is_one():
    known = {f"UNSHARD_{name.upper()}" for name in Settings.model_fields} | {"UNSHARD_STORAGE_PROFILES"}
    texts = [path.read_text() for path in (DOCKERFILE, COMPOSE, *DEPLOYMENTS)]
    of_compose = {"UNSHARD_DATA", "UNSHARD_SHM_SIZE", "UNSHARD_DATABASE_PASSWORD"}
    used = {name for text in texts for name in re.findall(r"UNSHARD_[A-Z_]*[A-Z]", text)} - of_compose
    assert used - known == {"UNSHARD_TOKEN"}  # of the command line
    assert {"UNSHARD_ADMIN_TOKEN", "UNSHARD_ALLOWED_SOURCES", "UNSHARD_DATABASE_URL"} <= used


# --- project -----------------------------------------------------------------------------------------------------


def test_every_dependency_is_pinned_exactly():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(name for extra in extras for name in extra)]
    names = {re.match(r"[A-Za-z0-9_.-]+", requirement)[0] for requirement in asked}
    normal = {re.sub("[-_.]+", "-", name).lower() for name in pins()}
    assert {re.sub("[-_.]+", "-", name).lower() for name in names} - normal == set()


def test_torch_is_pinned_without_a_build_suffix():
    assert "+" not in pins()["torch"]


def test_the_build_server_runs_what_a_developer_types():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-2:] == ["make check", "make test"]
    assert subprocess.run([shutil.which("bash"), "-n", script], check=False).returncode == 0
