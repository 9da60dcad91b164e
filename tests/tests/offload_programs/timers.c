/* Timers of connections by the C library: `timers ADDRESS PORT`, where somebody accepts them. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime, nanosleep */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "twheel_client.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("line %d: not so: %s (errno: %s)\n", __LINE__, #condition, strerror(errno));    \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define DATA (TWHEEL_DATA_IN | TWHEEL_DATA_OUT)
#define TEN_DAYS (10u * 86400 * 1000)

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void sleep_ms(long ms) {
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

static int is_ready(twheel *timers) {
    struct pollfd ready = {.fd = twheel_fd(timers), .events = POLLIN};
    return poll(&ready, 1, 0);
}

static int dial(char **arguments) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(arguments[2]))};
    CHECK(inet_pton(AF_INET, arguments[1], &to.sin_addr) == 1);
    int made = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(made >= 0 && connect(made, (struct sockaddr *)&to, sizeof to) == 0);
    return made;
}

static void check_refusals(twheel *timers, int connected) {
    int pipes[2], closed = dup(0);
    int udp = socket(AF_INET, SOCK_DGRAM, 0), unconnected = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(pipe(pipes) == 0 && udp >= 0 && unconnected >= 0 && close(closed) == 0);
    CHECK(twheel_start(timers, pipes[0], 1000, DATA, 0, 0, NULL) == -ENOTSOCK);
    CHECK(twheel_start(timers, udp, 1000, DATA, 0, 0, NULL) == -EPROTOTYPE);
    CHECK(twheel_start(timers, unconnected, 1000, DATA, 0, 0, NULL) == -ENOTCONN);
    CHECK(listen(unconnected, 1) == 0);
    CHECK(twheel_start(timers, unconnected, 1000, DATA, 0, 0, NULL) == -ENOTCONN);
    CHECK(twheel_start(timers, closed, 1000, DATA, 0, 0, NULL) == -EBADF);
    CHECK(twheel_start(timers, -1, 1000, DATA, 0, 0, NULL) == -EBADF);
    CHECK(twheel_start(timers, connected, 0, DATA, 0, 0, NULL) == -EINVAL);
    CHECK(twheel_start(timers, connected, TEN_DAYS + 1, DATA, 0, 0, NULL) == -EINVAL);
    CHECK(twheel_start(timers, connected, 1000, 0, 0, 0, NULL) == -EINVAL);
    CHECK(twheel_start(timers, connected, 1000, 8, 0, 0, NULL) == -EINVAL);
    CHECK(twheel_start(timers, connected, 1000, DATA, 3, 0, NULL) == -EINVAL);
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    twheel *timers = twheel_open(NULL);
    CHECK(timers != NULL);
    struct twheel_event event;
    uint64_t begun = now_ms();
    CHECK(twheel_next(timers, &event, 0) == 0 && twheel_next(timers, &event, 200) == 0);
    CHECK(now_ms() - begun >= 200);

    /* The longest timeout, and one that is stopped at once, may be had. */
    int connections[3];
    uint64_t ids[3], again;
    for (int at = 0; at < 3; at++) {
        connections[at] = dial(arguments);
        CHECK(twheel_start(timers, connections[at], TEN_DAYS, DATA, 0, 9, &again) == 0);
        CHECK(twheel_stop(timers, again) == 0 && twheel_stop(timers, again) == -ENOENT);
        sleep_ms(100);
        CHECK(twheel_start(timers, connections[at], 1000, DATA, 0, 1 + (uint64_t)at, &ids[at]) == 0);
    }
    check_refusals(timers, connections[0]);
    sleep_ms(500);
    int kept = twheel_is_offloaded(timers, ids[0]);
    CHECK(kept == 0 || kept == 1);
    puts(kept ? "kept by twheel" : "kept here");
    fflush(stdout);

    /* One goes on as before, one with another timeout, one not at all. */
    begun = now_ms();
    CHECK(twheel_restart(timers, ids[0], 0) == 0 && twheel_restart(timers, ids[1], 1500) == 0);
    CHECK(twheel_restart(timers, ids[1], TEN_DAYS + 1) == -EINVAL);
    CHECK(twheel_stop(timers, ids[2]) == 0 && is_ready(timers) == 0);
    for (int at = 0; at < 2; at++) {
        CHECK(twheel_next(timers, &event, at == 0 ? -1 : 5000) == 1);
        uint64_t took = now_ms() - begun, timeout = at == 0 ? 1000 : 1500;
        CHECK(event.timer == ids[at] && event.tag == 1 + (uint64_t)at);
        CHECK(event.what == TWHEEL_EXPIRED && event.error == 0 && event.idle_ms >= timeout);
        CHECK(took >= timeout && took < timeout + 1000);
        CHECK(twheel_is_offloaded(timers, ids[at]) == -ENOENT);
        CHECK(twheel_restart(timers, ids[at], 0) == -ENOENT);
        CHECK(twheel_stop(timers, ids[at]) == -ENOENT);
    }
    CHECK(twheel_next(timers, &event, 500) == 0 && is_ready(timers) == 0);

    /* Data keeps a timer from expiring, if it counts. */
    CHECK(twheel_start(timers, connections[0], 600, TWHEEL_DATA_OUT, 0, 10, NULL) == 0);
    CHECK(twheel_start(timers, connections[1], 600, TWHEEL_DATA_IN, 0, 11, NULL) == 0);
    for (int times = 0; times < 20; times++) {
        CHECK(send(connections[0], "!", 1, 0) == 1 && send(connections[1], "!", 1, 0) == 1);
        sleep_ms(50);
    }
    CHECK(twheel_next(timers, &event, 5000) == 1 && event.tag == 11);
    CHECK(twheel_next(timers, &event, 5000) == 1 && event.tag == 10);

    /* Connections are ended, and the event tells that when it is taken. */
    char byte;
    CHECK(twheel_start(timers, connections[0], 300, DATA, TWHEEL_SHUTDOWN, 20, NULL) == 0);
    CHECK(twheel_next(timers, &event, 5000) == 1 && event.tag == 20 && event.what == TWHEEL_EXPIRED);
    CHECK(recv(connections[0], &byte, 1, MSG_DONTWAIT) == 0);
    CHECK(twheel_start(timers, connections[1], 300, DATA, TWHEEL_DESTROY, 21, NULL) == 0);
    CHECK(twheel_next(timers, &event, 5000) == 1 && event.tag == 21 && event.what == TWHEEL_EXPIRED);
    CHECK(send(connections[1], "!", 1, MSG_NOSIGNAL) < 0);

    /* A socket that is closed has an end of its own. */
    CHECK(twheel_start(timers, connections[2], 2000, DATA, 0, 22, NULL) == 0);
    sleep_ms(200);
    CHECK(close(connections[2]) == 0);
    CHECK(twheel_next(timers, &event, 10000) == 1 && event.tag == 22 && event.what == TWHEEL_CLOSED);

    twheel_close(timers);
    twheel_close(NULL);
    puts("done");
    return 0;
}
