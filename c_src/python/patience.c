/* How long a call that is to be asynchronous polls before a Work is made.
 *
 * torch's recv() is irecv() and wait() to a group, and send() likewise. Polling for the message before a Work is made
 * saves half of the call where wait() follows at once, and holds up whoever has something else to do: so only where it
 * did, the last times. */
#include "engine/pause.h"
#include "python/call.h"

enum { SURE = 2, PATIENCE_NS = 50000, MOST_PATIENCE_NS = 500000 };

static struct {
    uintptr_t op; /* of any group's calls the last asynchronous one, if it is a message that nobody has waited for */
    int64_t begun;
    int waited_for; /* so many in a row, at once; at most SURE */
} last_message;

/* A long message takes 0.1 ns a byte and more. */
static int64_t patience_for(size_t bytes) {
    size_t ns = PATIENCE_NS + bytes / 4;
    return ns < MOST_PATIENCE_NS ? (int64_t)ns : MOST_PATIENCE_NS;
}

int64_t mpp_patience(const call *c) {
    if (c->sync) return MPP_SLICE_NS;
    if (last_message.op) last_message.waited_for = 0;
    last_message.op = 0;
    if (c->peer == ANY_PEER) return -1; /* even if it is complete it must be asked where it came from */
    return mpp_is_message(c) && last_message.waited_for == SURE ? patience_for(c->bytes) : 0;
}

void mpp_note_message(const call *c, uintptr_t op) {
    if (!op || !mpp_is_message(c)) return;
    last_message.op = op;
    last_message.begun = now_ns();
}

void mpp_note_wait(uintptr_t op) {
    if (!op || op != last_message.op) return;
    last_message.op = 0;
    if (now_ns() - last_message.begun >= 2 * PATIENCE_NS) last_message.waited_for = 0;
    else if (last_message.waited_for < SURE) last_message.waited_for++;
}
