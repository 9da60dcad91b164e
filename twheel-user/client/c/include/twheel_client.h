/* Hands the idle timeouts of TCP connections to twheel (docs/offload.md).
 *
 * Every function may be called from any thread, for as long as the handle is open. Functions that
 * return an int return a negative error number if they fail, as Linux' system calls do. After
 * fork(2), only the parent may use a handle: the child has no thread for it. */
#ifndef TWHEEL_CLIENT_H
#define TWHEEL_CLIENT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What counts as life; may be combined. */
#define TWHEEL_DATA_IN 1  /* data from the other end */
#define TWHEEL_DATA_OUT 2 /* data from this end */
#define TWHEEL_ANY 4      /* any packet */

/* What is done with an idle connection, beside telling. */
#define TWHEEL_NOTIFY 0
#define TWHEEL_SHUTDOWN 1
#define TWHEEL_DESTROY 2

/* How a timer ended. */
#define TWHEEL_EXPIRED 1
#define TWHEEL_CLOSED 2

struct twheel_event {
    uint64_t timer;   /* as twheel_start gave it; it is over */
    uint64_t tag;     /* as twheel_start was given it */
    uint32_t what;    /* TWHEEL_EXPIRED, TWHEEL_CLOSED, or 0: refused */
    uint32_t idle_ms; /* of TWHEEL_EXPIRED: for how long the connection had been idle */
    int32_t error;    /* of 0: why, a positive error number */
    uint32_t reserved;
};

typedef struct twheel twheel;

/* Connects to the twheel that listens at path; NULL: at $TWHEEL_OFFLOAD, or /run/twheel/offload. It
 * need not be there: until it is, a thread of this process keeps the timers. That thread has all
 * signals blocked. Returns NULL if no thread or descriptor can be had; errno says why. */
twheel *twheel_open(const char *path);

/* Stops all timers, and frees the handle. NULL is allowed. */
void twheel_close(twheel *handle);

/* A descriptor that is readable while events wait, for poll(2) and the like. It is the handle's: do
 * not read or close it. */
int twheel_fd(const twheel *handle);

/* Starts a timer of a connected TCP socket, which stays the caller's. timeout_ms: 1 ms to 10 days;
 * life and action: as above; tag: given back with the event; timer: where to store the timer's
 * number, or NULL. A timer has one event, unless it is stopped. If twheel refuses it, that is the
 * event.
 *
 * A socket may be closed while it has a timer. Then the event is TWHEEL_CLOSED, but it may come as
 * late as the timeout: when the descriptor's number is that of another connection.
 *
 * -EINVAL: no timeout or one that is too long, no or unknown bits of life, an unknown action.
 * -EBADF, -ENOTSOCK, -EPROTOTYPE, -ENOTCONN: no open descriptor, no socket, not TCP, not
 * connected. */
int twheel_start(twheel *handle, int socket, uint32_t timeout_ms, uint8_t life, uint8_t action,
                 uint64_t tag, uint64_t *timer);

/* Begins the timeout anew; timeout_ms: another one from now on, or 0: as before. -ENOENT: the timer
 * is over. -EINVAL: more than 10 days. */
int twheel_restart(twheel *handle, uint64_t timer, uint32_t timeout_ms);

/* Stops a timer: no event of it comes any more. -ENOENT: it is over, and its event waits or was
 * taken. */
int twheel_stop(twheel *handle, uint64_t timer);

/* Whether twheel keeps the timer (1), not this process (0). -ENOENT: it is over. */
int twheel_is_offloaded(const twheel *handle, uint64_t timer);

/* Takes the next event. Returns 1, or 0 if none has come within wait_ms, which is as for poll(2): 0
 * does not wait, and a negative number waits until one comes. -EINTR: a signal was handled. */
int twheel_next(twheel *handle, struct twheel_event *event, int wait_ms);

#ifdef __cplusplus
}
#endif

#endif
