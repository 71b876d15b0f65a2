"""Serves functions written by `jax.export` over HTTP; needs JAX, but not jamp.

    python examples/serve_exported.py runs/export/float16.jax --port 8000

This serves the function at /float16. The body of a POST is the bytes of a float32 array
[n, ...] in the shape that the function takes; the answer is the bytes of its float32
result. The server listens only on 127.0.0.1 and ends after `--requests` requests, or
after a minute without one. It compiles for each new n. A file written by a newer JAX
may not load. Load only files that you trust.

Needs `pip install jax flatbuffers`.
"""

import argparse
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jax
import numpy as np

LARGEST = 2**24  # bytes of a request
functions = {}  # path -> shape of its argument, compiled function


class Handler(BaseHTTPRequestHandler):
    timeout = 20  # seconds, for a client that does not send its whole body

    def do_POST(self):
        if self.path not in functions:
            return self.send_error(404)
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or not 0 < int(size) <= LARGEST:
            return self.send_error(413)
        shape, function = functions[self.path]
        try:
            array = np.frombuffer(self.rfile.read(int(size)), "<f4").reshape(shape)
            answer = np.asarray(function(array), "<f4").tobytes()
        except ValueError:
            return self.send_error(400, f"not float32 of the shape {shape}")
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format, *args):
        """Logs nothing for a request."""


class Server(HTTPServer):
    timeout = 60

    def handle_timeout(self):
        raise SystemExit("no request for a minute")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="that jax.export wrote")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument("--requests", type=int, default=1000, help="default: 1000")
    args = parser.parse_args(argv)
    missing = [str(path) for path in args.files if not path.is_file()]
    if missing or len({path.stem for path in args.files}) < len(args.files):
        parser.error(f"files need names of their own, and to exist: {missing}")

    for path in args.files:
        exported = jax.export.deserialize(bytearray(path.read_bytes()))
        shape = -1, *exported.in_avals[0].shape[1:]
        functions[f"/{path.stem}"] = shape, jax.jit(exported.call)
    with Server(("127.0.0.1", args.port), Handler) as server:
        names = ", ".join(functions)
        print(f"Serving {names} on port {server.server_port}", flush=True)
        for _ in range(args.requests):
            server.handle_request()


if __name__ == "__main__":
    main()
