"""The documents' Kubernetes manifests, against the published types of Kubernetes and of JobSet."""

import copy
import re
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models.io_k8s_api_batch_v1_job import IoK8sApiBatchV1Job
from kubeflow_trainer_api.models.jobset_v1alpha2_failure_policy_rule import JobsetV1alpha2FailurePolicyRule
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from jaxdp.errors import EXIT_STOPPED
from jaxdp.parallel.cluster import Cluster, find

DOCS = Path(__file__).parent.parent / "docs"
KINDS = {("jobset.x-k8s.io/v1alpha2", "JobSet"): JobsetV1alpha2JobSet, ("batch/v1", "Job"): IoK8sApiBatchV1Job}
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def manifest_of(page: str) -> dict:
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return yaml.safe_load(text)


def read(manifest: dict) -> dict:
    """What the types make of it: without the fields that they do not know, and with those that must be there."""
    return KINDS[manifest["apiVersion"], manifest["kind"]].from_dict(manifest).to_dict()


def places(node, path=()):
    """The path of every field."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in pairs:
        if isinstance(node, dict):
            yield (*path, name)
        yield from places(value, (*path, name))


def misspelt(manifest: dict, path: tuple) -> dict:
    changed = copy.deepcopy(manifest)
    node = changed
    for name in path[:-1]:
        node = node[name]
    node[path[-1] + "x"] = node.pop(path[-1])
    return changed


@pytest.fixture(scope="module")
def jobset():
    return manifest_of("clusters.md")


@pytest.fixture(scope="module")
def train(jobset):
    """The only one of its replicated jobs."""
    (one,) = jobset["spec"]["replicatedJobs"]
    return one


@pytest.mark.parametrize("page", ["clusters.md", "resuming.md"])
def test_every_field_is_one_that_the_types_know_and_none_is_missing(page):
    manifest = manifest_of(page)
    assert read(manifest) == manifest


@pytest.mark.parametrize("page", ["clusters.md", "resuming.md"])
def test_a_misspelt_field_is_found_wherever_it_is(page):
    manifest = manifest_of(page)
    free = {"limits"}  # whose names are not those of fields
    tried = [path for path in places(manifest["spec"], ("spec",)) if not free & set(path[:-1])]
    assert len(tried) > 20
    for path in tried:
        wrong = misspelt(manifest, path)
        try:
            found = read(wrong) != wrong
        except (KeyError, ValueError):
            found = True
        assert found, path


def test_each_pod_is_a_rank_of_one_run(jobset, train):
    name, pods = jobset["metadata"]["name"], train["template"]["spec"]
    assert pods["completionMode"] == "Indexed"
    assert pods["completions"] == pods["parallelism"]
    number = pods["parallelism"] * train["replicas"]
    (container,) = pods["template"]["spec"]["containers"]
    for rank in range(number):
        environment = {}
        for one in container["env"]:
            if "valueFrom" in one:
                assert one["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            environment[one["name"]] = one.get("value", str(rank))
        # JobSet's name of the first pod: JOBSET-REPLICATEDJOB-JOB-POD.JOBSET
        assert find("auto", environment) == Cluster("jax", f"{name}-{train['name']}-0-0.{name}", 29_400, rank, number)
    assert number == 2
    assert train["replicas"] == 1, "a completion index counts within one job"


def test_a_stop_restarts_all_without_being_counted_and_a_failure_is_counted(jobset, train):
    pods, policy = train["template"]["spec"], jobset["spec"]["failurePolicy"]
    assert pods["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [EXIT_STOPPED]}}
    ]
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    valid = JobsetV1alpha2FailurePolicyRule.model_fields["action"].description.partition("Valid values are ")[2]
    assert rule["action"] in re.findall(r"\w+", valid)
    assert policy["maxRestarts"] > 0
    assert pods["backoffLimit"] == 0, "a process that starts again alone does not find the others"


def test_a_job_of_one_process_starts_again_after_a_stop_without_counting_it():
    job = manifest_of("resuming.md")["spec"]
    assert job["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [EXIT_STOPPED]}}
    ]
    assert job["backoffLimit"] > 0


def test_there_is_time_to_save_and_restarts_are_the_jobs(train):
    for pods in (train["template"]["spec"], manifest_of("resuming.md")["spec"]):
        pod = pods["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= 60
        assert pod["restartPolicy"] == "Never", "a pod failure policy needs it"
        volumes = {one["name"] for one in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts.keys() == volumes
        workdir = container["command"][container["command"].index("--workdir") + 1]
        assert any(workdir.startswith(f"{path}/") for path in mounts.values())
