"""The check of object storage: whether a run can write to its URL."""

import secrets
import time

from jaxdp.doctor.check_result import ResultBuilder
from jaxdp.errors import StorageError

SLOW_REQUEST_SECONDS = 1.0


def check_storage(result: ResultBuilder, url: str) -> None:
    """Objects can be written, read, listed and removed at the URL of a run, and created only once. Raises ConfigError."""
    from jaxdp.cloud.retry import open_patiently

    location, name, content = open_patiently(url, "--workdir"), f".doctor-{secrets.token_hex(4)}", b"x" * 1000
    began = time.monotonic()
    try:
        location.create(name, content)
        created_again = location.create(name, content)
        is_same = location.read(name) == content and name in location.top_sizes()
        location.remove([name])
    except StorageError as error:
        fix = "check the URL, the credentials and their permissions: reading, writing, listing, removing"
        result.error(str(error), fix)
        return
    seconds = (time.monotonic() - began) / 5
    message = f"{url} can be written and read, {1000 * seconds:.0f} ms a request"
    if not is_same:
        result.error(f"{url} does not return what was written", "use another URL")
    elif created_again:
        fix = "do not start two runs there at the same moment"
        result.warning(f"{message}; it does not support conditional writes", fix)
    elif seconds > SLOW_REQUEST_SECONDS:
        result.warning(message, "use a bucket in the region of this machine")
    else:
        result.ok(message)
