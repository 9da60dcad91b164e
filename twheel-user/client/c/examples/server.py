"""An echo server that closes connections which were idle for five seconds.

    cargo build --release -p twheel-client-c
    python3 twheel-user/client/c/examples/server.py target/release/libtwheel_client_c.so 7000
"""

import ctypes
import os
import selectors
import socket
import sys

DATA_IN, SHUTDOWN, EXPIRED, CLOSED = 1, 1, 1, 2


class Event(ctypes.Structure):
    """`struct twheel_event`."""

    _fields_ = [
        ("timer", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("what", ctypes.c_uint32),
        ("idle_ms", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
    ]


class Timers:
    """Idle timers of sockets, kept by twheel where it runs."""

    def __init__(self, library, path=None):
        self.library = ctypes.CDLL(library, use_errno=True)
        self.library.twheel_open.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(
            self.library.twheel_open(path.encode() if path else None)
        )
        if not self.handle:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot start the timers: {os.strerror(error)}")

    def fileno(self):
        return self.library.twheel_fd(self.handle)

    def start(self, connection, seconds, life, action):
        error = self.library.twheel_start(
            self.handle,
            ctypes.c_int(connection.fileno()),
            ctypes.c_uint32(int(seconds * 1000)),
            ctypes.c_uint8(life),
            ctypes.c_uint8(action),
            ctypes.c_uint64(connection.fileno()),
            None,
        )
        if error:
            raise OSError(-error, os.strerror(-error))

    def ends(self):
        event = Event()
        while self.library.twheel_next(self.handle, ctypes.byref(event), 0) == 1:
            yield event.tag, event.what, event.idle_ms / 1000, event.error


def main():
    timers = Timers(sys.argv[1])
    listener = socket.create_server(
        ("", int(sys.argv[2])), family=socket.AF_INET6, dualstack_ipv6=True
    )
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(timers.fileno(), selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                selector.register(connection, selectors.EVENT_READ)
                try:
                    timers.start(connection, 5, DATA_IN, SHUTDOWN)
                except OSError as error:
                    # It has been closed by the other end.
                    print(f"no timer: {error.strerror}", file=sys.stderr)
            elif key.fd == timers.fileno():
                for tag, what, idle, error in timers.ends():
                    if what == EXPIRED:
                        print(f"connection {tag} was idle for {idle:.1f} s", flush=True)
                    elif what != CLOSED:
                        print(f"no timer: {os.strerror(error)}", file=sys.stderr)
            else:
                try:
                    data = key.fileobj.recv(4096)
                    key.fileobj.sendall(data)
                except OSError:
                    # It was reset, or is shut down just now.
                    data = b""
                if not data:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()


if __name__ == "__main__":
    main()
