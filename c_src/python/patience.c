/* How long a call that is to be asynchronous polls before a Work is made; and the wait for a Work.
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
    if (c->then) return -1; /* even if it is complete it goes on */
    if (c->sync) return MPP_SLICE_NS;
    if (last_message.op) last_message.waited_for = 0;
    last_message.op = 0;
    if (c->o.peer == ANY_PEER) return -1; /* even if it is complete it must be asked where it came from */
    return mpp_is_message(c) && last_message.waited_for == SURE ? patience_for(c->bytes) : 0;
}

void mpp_note_message(const call *c, uintptr_t op) {
    if (!op || !mpp_is_message(c)) return;
    last_message.op = op;
    last_message.begun = now_ns();
}

static void note_wait(uintptr_t op) {
    if (!op || op != last_message.op) return;
    last_message.op = 0;
    if (now_ns() - last_message.begun >= 2 * PATIENCE_NS) last_message.waited_for = 0;
    else if (last_message.waited_for < SURE) last_message.waited_for++;
}

/* ---- Work.wait ---- */

static int is_none(PyObject *work, PyObject *name) {
    PyObject *value = PyObject_GetAttr(work, name);
    int none = value == Py_None;
    if (!value) PyErr_Clear();
    Py_XDECREF(value);
    return none;
}

/* Of a Work whose result needs nothing more done than to be there. */
static int can_finish(PyObject *work) {
    PyObject *finished = PyObject_GetAttr(work, interned.finished);
    int open = finished == Py_False && is_none(work, interned.finish) && is_none(work, interned.then) &&
               is_none(work, interned.future) && is_none(work, interned.error);
    Py_XDECREF(finished);
    return open && !PyErr_Occurred();
}

static int wait_a_slice(PyObject *work) { /* whether it is complete, and all is well */
    if (!can_finish(work)) return 0;
    PyObject *handle = PyObject_GetAttr(work, interned.handle);
    uintptr_t op = handle ? (uintptr_t)PyLong_AsUnsignedLongLong(handle) : 0;
    int state = MPP_PENDING;
    if (op && !PyErr_Occurred()) {
        note_wait(op);
        PyThreadState *gil = PyEval_SaveThread();
        state = mpp_engine->wait(op, MPP_SLICE_NS);
        PyEval_RestoreThread(gil);
    }
    /* Not reported to the background too, and nobody has asked for a future meanwhile: from here to the end no other
     * thread of Python runs. */
    int done = state == MPP_DONE && can_finish(work) && set(work, interned.finished, shared(Py_True)) &&
               set(work, interned.keep, shared(Py_None));
    if (done && PyDict_DelItem(bridge_state.registry, handle)) PyErr_Clear();
    if (!done) PyErr_Clear();
    Py_XDECREF(handle);
    return done;
}

PyObject *mpp_wait_for(PyObject *module, PyObject *work) {
    (void)module;
    PyObject *type = (PyObject *)Py_TYPE(work);
    if (type == bridge_state.pending || type == bridge_state.work) mpp_note_asked_for(work);
    int is_over =
        bridge_state.is_ready &&
        (type == bridge_state.work || (type == bridge_state.pending && bridge_state.is_watched && wait_a_slice(work)));
    return shared(is_over ? Py_True : Py_False);
}
