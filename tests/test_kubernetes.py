"""The Kubernetes example is valid, and matches the server's behaviour."""

from __future__ import annotations

from typing import Any

import pytest

from command_line import ROOT
from penstock.cli import parse
from penstock.commands.flags import read_settings
from penstock.config import ServeConfig, from_mapping

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / "examples/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
VERSIONS = ("1.27", "1.31")


def objects(kind: str = "") -> list[dict[str, Any]]:
    found = [one for path in FILES for one in yaml.safe_load_all(path.read_text())]
    return [one for one in found if kind in ("", one["kind"])]


def pod() -> dict[str, Any]:
    (deployment,) = objects("Deployment")
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    found: dict[str, Any] = only
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kubernetes_would_accept_every_object(path: Any, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for one in yaml.safe_load_all(path.read_text()):
        assert validate.validate(one, version, strict=True)


def test_pods_of_the_ray_cluster_would_be_accepted() -> None:
    """There is no schema of the operator's own fields here; tests/on_ray reads its Serve config."""
    validate = pytest.importorskip("kubernetes_validate")
    (service,) = yaml.safe_load_all((ROOT / "examples/ray/kuberay.yaml").read_text())
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(groups) == 2
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
        assert validate.validate({**pod, **group["template"]}, VERSIONS[-1], strict=True)


def test_a_wrong_field_is_found() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    (service,) = objects("Service")
    service["spec"]["ports"][0]["targetport"] = "http"
    with pytest.raises(validate.ValidationError):
        validate.validate(service, VERSIONS[0], strict=True)


def test_the_server_understands_its_words_and_has_the_gpus_it_needs() -> None:
    name, arguments = parse(container()["args"])
    assert name == "serve"
    config: ServeConfig = from_mapping(ServeConfig, read_settings(ServeConfig, arguments, {}))
    num_gpus = int(container()["resources"]["limits"]["nvidia.com/gpu"])
    assert config.replicas * arguments.tp == num_gpus
    assert config.port == container()["ports"][0]["containerPort"]
    assert config.host == "0.0.0.0"


def test_running_replies_may_end_before_the_pod_does() -> None:
    _, arguments = parse(container()["args"])
    command = container()["lifecycle"]["preStop"]["exec"]["command"]
    grace_s = pod()["terminationGracePeriodSeconds"]
    assert command[0] == "sleep"
    assert grace_s >= int(command[1]) + arguments.drain_timeout + 10


def test_probes_ask_routes_that_need_no_key_and_say_whether_it_serves() -> None:
    """tests/test_serve_access.py asks them."""
    probes = [container()[name] for name in ("startupProbe", "readinessProbe")]
    assert {probe["httpGet"]["path"] for probe in probes} == {"/ready"}
    assert "tcpSocket" in container()["livenessProbe"]
    start = container()["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800


def test_everything_that_is_mounted_or_selected_exists() -> None:
    mounts = {mount["name"] for mount in container()["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod()["volumes"]}
    (deployment,) = objects("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [objects("Service")[0]["spec"]["selector"]]
    selectors += [deployment["spec"]["selector"]["matchLabels"]]
    selectors += [objects("PodDisruptionBudget")[0]["spec"]["selector"]["matchLabels"]]
    for selector in selectors:
        assert selector.items() <= labels.items()
    scraped = yaml.safe_load(objects("ConfigMap")[0]["data"]["penstock.yaml"])
    (job,) = scraped["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
