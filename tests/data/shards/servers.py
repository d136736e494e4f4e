"""Real servers of shards, with the faults of real servers."""

import re
import socket
import struct
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server(ThreadingHTTPServer):
    """Sends the files of a folder over HTTP.

    `faults` maps a part of a path to what happens to requests of it, in turn; None in the list is a good answer, and
    after its end all are good. A number is a status; "reset" closes the connection in the middle, "cut" sends half of
    what it promised, "silent" never answers, "drip" sends ten bytes a second. `version` names the header that states
    the version of a file.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder, ranges=True):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.ranges, self.version = Path(folder), ranges, "ETag"
        self.faults, self.requests, self.lock = {}, [], threading.Lock()
        self.ended = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client may go."""

    def next_fault(self, path):
        with self.lock:
            for part, faults in self.faults.items():
                if part in path and faults:
                    return faults.pop(0) if isinstance(faults, list) else faults
        return None

    def gets(self, part=".tar"):
        """How often each (path, range) was asked for by GET, of paths that contain `part`."""
        return Counter((path, asked) for method, path, asked in self.requests if method == "GET" and part in path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        server, asked = self.server, self.headers.get("Range")
        path = self.path.partition("?")[0]
        with server.lock:
            server.requests.append((self.command, path, asked))
        fault = server.next_fault(path) if body else None
        file = server.folder / path.lstrip("/")
        if fault == "silent":
            server.ended.wait(60)
            return self.drop()
        if isinstance(fault, int) or not file.is_file():
            return self.refuse(fault or 404)
        data = file.read_bytes()
        start, end, status = 0, len(data), 200
        if asked and server.ranges:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked).groups()
            start, end, status = int(first), min(int(last or len(data)) + 1, len(data)), 206
        if start >= len(data):
            return self.refuse(416)
        self.send_response(status)
        self.send_header("Content-Length", str(end - start))
        if server.version:
            self.send_header(server.version, f'"{file.stat().st_mtime_ns}"')
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return None
        if fault == "drip":
            return self.drip(data[start:end])
        self.wfile.write(data[start : (start + end) // 2] if fault in ("cut", "reset") else data[start:end])
        return self.drop(fault == "reset") if fault in ("cut", "reset") else None

    def drip(self, data):
        for place in range(len(data)):
            self.wfile.write(data[place : place + 1])
            if self.server.ended.wait(0.1):
                return

    def refuse(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def drop(self, hard=True):
        """Ends the connection; `hard` as a crash does."""
        self.wfile.flush()
        if hard:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
