"""ClickHouse's engine behind as much of ClickHouse's HTTP interface as twheel uses.

The engine is chdb: that of today's server, in this process. The wire is ours: a request becomes a
query of one session, one at a time. Users, settings, parameters and the numbers of errors are as
the server has them. Arguments: the directory of the data, and for a login USER and PASSWORD.

The first line on standard output is the port. It ends when standard input is closed.
"""

import os
import re
import sys
import threading
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from chdb import session

DIRECTORY = sys.argv[1]
LOGIN = tuple(sys.argv[2:4])
SESSION = session.Session(DIRECTORY)
LOCK = threading.Lock()
# What is no setting of a query in an address.
OTHERS = {"query", "database", "default_format", "user", "password", "wait_end_of_query"}
NOT_FOUND = {60, 81}
FORBIDDEN = {192, 193, 194, 497, 516}
# How the server cuts what comes after FORMAT off an INSERT: there its data begin.
INSERT = re.compile(rb"^\s*INSERT\s", re.IGNORECASE)


def run(sql, data, fields):
    """The answer to a query, of the settings and parameters of a request."""
    database = fields.get("database", "default")
    settings = {k: v for k, v in fields.items() if k not in OTHERS and not k.startswith("param_")}
    params = {k[len("param_"):]: v for k, v in fields.items() if k.startswith("param_")}
    with LOCK:
        SESSION.query("USE `%s`" % database.replace("`", "\\`"))
        for name, value in settings.items():
            if not name.isidentifier():
                raise RuntimeError("Code: 115. DB::Exception: Unknown setting")
            SESSION.query("SET %s = '%s'" % (name, value.replace("\\", "\\\\").replace("'", "\\'")))
        try:
            if INSERT.match(sql.encode()) and data:
                sql = sql + "\n" + data.decode("utf-8", "surrogateescape")
            answer = SESSION.query(sql, fields.get("default_format", "TSV"), params=params)
            return bytes(answer.bytes() or b"")
        finally:
            for name in settings:
                SESSION.query("SET %s = DEFAULT" % name)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while True:
            size = int(self.rfile.readline().split(b";")[0], 16)
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            if size == 0:
                return b"".join(parts)

    def answer(self, status, body, code=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "text/plain; charset=UTF-8")
        if code:
            self.send_header("X-ClickHouse-Exception-Code", str(code))
        self.end_headers()
        self.wfile.write(body)

    def fail(self, text):
        found = re.search(r"Code: (\d+)", text)
        code = int(found.group(1)) if found else 1002
        status = 404 if code in NOT_FOUND else 403 if code in FORBIDDEN else 500
        self.answer(status, (text.strip() + "\n").encode("utf-8", "replace"), code)

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        body = self.body()
        url = urlsplit(self.path)
        if url.path == "/ping":
            return self.answer(200, b"Ok.\n")
        fields = dict(parse_qsl(url.query, keep_blank_values=True))
        kind = self.headers.get("Content-Type", "")
        if kind.startswith("multipart/form-data"):
            whole = b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body
            for part in BytesParser().parsebytes(whole).get_payload():
                name = part.get_param("name", header="content-disposition")
                fields[name] = part.get_payload(decode=True).decode()
            body = b""
        user = self.headers.get("X-ClickHouse-User", fields.get("user", "default"))
        key = self.headers.get("X-ClickHouse-Key", fields.get("password", ""))
        if LOGIN and (user, key) != LOGIN:
            return self.fail("Code: 516. DB::Exception: %s: Authentication failed" % user)
        if "query" in fields:
            sql, data = fields["query"], body
        else:
            sql, data = body.decode("utf-8", "surrogateescape"), b""
        try:
            self.answer(200, run(sql, data, fields))
        except Exception as error:
            self.fail(str(error))


def until_closed():
    sys.stdin.buffer.read()
    os._exit(0)


ThreadingHTTPServer.daemon_threads = True
SERVER = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=until_closed, daemon=True).start()
print(SERVER.server_address[1], flush=True)
SERVER.serve_forever()
