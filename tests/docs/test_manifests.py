"""The Kubernetes manifests in the documentation, checked against the published types of Kubernetes and JobSet."""

import re
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models.io_k8s_api_batch_v1_job import IoK8sApiBatchV1Job
from kubeflow_trainer_api.models.jobset_v1alpha2_failure_policy_rule import JobsetV1alpha2FailurePolicyRule
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from jaxdp.distributed.launchers import Cluster, detect
from jaxdp.errors import EXIT_STOPPED
from jaxdp.recipes import load_config

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {("jobset.x-k8s.io/v1alpha2", "JobSet"): JobsetV1alpha2JobSet, ("batch/v1", "Job"): IoK8sApiBatchV1Job}
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def manifest_of(page: str) -> dict:
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return yaml.safe_load(text)


def parse(manifest: dict) -> dict:
    """The manifest as the types parse it: without unknown fields, and with required ones."""
    return KINDS[manifest["apiVersion"], manifest["kind"]].from_dict(manifest).to_dict()


@pytest.fixture(scope="module")
def jobset():
    return manifest_of("clusters.md")


@pytest.fixture(scope="module")
def train(jobset):
    """The only replicated job."""
    (job,) = jobset["spec"]["replicatedJobs"]
    return job


@pytest.mark.parametrize("page", ["clusters.md", "resuming.md"])
def test_documented_manifest_has_only_known_and_all_required_fields(page):
    manifest = manifest_of(page)
    assert parse(manifest) == manifest


def test_each_pod_of_the_jobset_is_detected_as_a_rank_of_one_run(jobset, train):
    name, pods = jobset["metadata"]["name"], train["template"]["spec"]
    assert pods["completionMode"] == "Indexed"
    assert pods["completions"] == pods["parallelism"]
    number = pods["parallelism"] * train["replicas"]
    (container,) = pods["template"]["spec"]["containers"]
    for rank in range(number):
        environment = {}
        for variable in container["env"]:
            if "valueFrom" in variable:
                assert variable["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            environment[variable["name"]] = variable.get("value", str(rank))
        # JobSet names the first pod JOBSET-REPLICATEDJOB-JOB-POD.JOBSET
        assert detect("auto", environment) == Cluster("jax", f"{name}-{train['name']}-0-0.{name}", 29_400, rank, number)
    assert number == 2
    assert train["replicas"] == 1, "a completion index is unique within one job only"


def test_jobset_restarts_after_a_stop_without_limit_and_after_a_failure_with_one(jobset, train):
    pods, policy = train["template"]["spec"], jobset["spec"]["failurePolicy"]
    assert pods["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [EXIT_STOPPED]}}
    ]
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    valid = JobsetV1alpha2FailurePolicyRule.model_fields["action"].description.partition("Valid values are ")[2]
    assert rule["action"] in re.findall(r"\w+", valid)
    assert policy["maxRestarts"] > 0
    assert pods["backoffLimit"] == 0, "a process that restarts alone cannot rejoin the run"


@pytest.mark.parametrize("page", ["clusters.md", "resuming.md"])
def test_documented_manifest_runs_the_image_of_the_dockerfile(page, train):
    pod = (train["template"]["spec"] if page == "clusters.md" else manifest_of(page)["spec"])["template"]["spec"]
    (container,), dockerfile = pod["containers"], (DOCS.parent / "Dockerfile").read_text()
    assert container["image"] in re.findall(r"docker build -t (\S+)", dockerfile)
    assert "command" not in container, "it would replace the entry point"
    assert container["args"][:5:2] == ["train", "imagenet_goyal_256", "/data/runs/goyal"]
    assert load_config("imagenet_goyal_256", container["args"][5:]).data.directory == "/data/datasets"
    assert f"--uid {pod['securityContext']['fsGroup']} " in dockerfile
