/* An echo server that closes connections which were idle for five seconds:
 *
 *   cargo build --release -p twheel-client-c
 *   cc -o server twheel-user/client/c/examples/server.c -Itwheel-user/client/c/include \
 *      target/release/libtwheel_client_c.a -lpthread -ldl -lm
 *   ./server 7000
 */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "twheel_client.h"

static void fail(const char *what, int error) {
    fprintf(stderr, "%s: %s\n", what, strerror(error));
    exit(1);
}

int main(int count, char **arguments) {
    uint16_t port = count > 1 ? (uint16_t)atoi(arguments[1]) : 7000;
    struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    int one = 1;
    int listener = socket(AF_INET6, SOCK_STREAM, 0);
    if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) < 0 ||
        bind(listener, (struct sockaddr *)&address, sizeof address) < 0 ||
        listen(listener, 128) < 0)
        fail("cannot listen", errno);
    twheel *timers = twheel_open(NULL);
    if (timers == NULL)
        fail("cannot start the timers", errno);

    int poller = epoll_create1(0);
    int watched[] = {listener, twheel_fd(timers)};
    for (int at = 0; at < 2; at++) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = watched[at]};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, watched[at], &event) < 0)
            fail("cannot poll", errno);
    }
    for (;;) {
        struct epoll_event ready;
        if (epoll_wait(poller, &ready, 1, -1) != 1)
            continue;
        int descriptor = ready.data.fd;
        if (descriptor == listener) {
            int connection = accept(listener, NULL, NULL);
            if (connection < 0)
                continue; /* it was reset before it was accepted */
            struct epoll_event event = {.events = EPOLLIN, .data.fd = connection};
            epoll_ctl(poller, EPOLL_CTL_ADD, connection, &event);
            /* The tag is the descriptor. Its reads and writes do nothing for the timer. */
            int error = twheel_start(timers, connection, 5000, TWHEEL_DATA_IN, TWHEEL_SHUTDOWN,
                                     (uint64_t)connection, NULL);
            if (error != 0)
                fprintf(stderr, "no timer: %s\n", strerror(-error));
        } else if (descriptor == twheel_fd(timers)) {
            struct twheel_event event;
            while (twheel_next(timers, &event, 0) == 1)
                if (event.what == TWHEEL_EXPIRED)
                    printf("connection %" PRIu64 " was idle for %.1f s\n", event.tag,
                           event.idle_ms / 1000.0);
                else if (event.what != TWHEEL_CLOSED)
                    fprintf(stderr, "no timer: %s\n", strerror(event.error));
            fflush(stdout);
        } else {
            char bytes[4096];
            ssize_t got = read(descriptor, bytes, sizeof bytes);
            /* It may be shut down just now: without the flag, a signal would end this program. */
            if (got <= 0 || send(descriptor, bytes, (size_t)got, MSG_NOSIGNAL) != got)
                close(descriptor);
        }
    }
}
