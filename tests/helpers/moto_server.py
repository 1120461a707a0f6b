"""A moto server on 127.0.0.1 that handles one request at a time, so that conditional writes are atomic.

`python moto_server.py PORT`
"""

import logging
import sys
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class Serialized(DomainDispatcherApplication):
    """moto looks for the object, then writes it; between the two, no other request may run."""

    one_at_a_time = threading.Lock()

    def __call__(self, environ, start_response):
        with self.one_at_a_time:
            return list(super().__call__(environ, start_response))


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    make_server("127.0.0.1", int(sys.argv[1]), Serialized(create_backend_app), threaded=True).serve_forever()
