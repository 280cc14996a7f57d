/* From a method of c10d that torch calls to the engine and back, without a line of Python.
 *
 * `Method` stands in a class in place of a method written in Python, and keeps that: whatever is not plain (another
 * kind of tensor, wrong arguments, a profiler, a group that is broken or collects operations) it hands over to it. So
 * errors and their words are in one place, and the two do the same: tests/mpi/test_call_paths.py compares them.
 *
 * Rules: a call counts only when nothing can keep it from being started; no Python code runs between that and the
 * operation's entry in the registry, whose owner it is from then on; the GIL is free while the engine is at work. */
#include "python/bridge.h"

#include "engine/pause.h"

enum { MOST_FRAMES = 16, QUIET_BYTES = 65536 };

mpp_bridge_state bridge_state;
mpp_interned interned;

/* ---- what is noted of a call ---- */

static PyObject *shared(PyObject *object) {
    Py_INCREF(object);
    return object;
}

static long long epoch_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int is_message(const call *c) { return c->peer != NO_PEER; }

static PyObject *peer_of(const call *c) { return is_message(c) ? PyLong_FromLong(c->peer) : shared(Py_None); }

/* Borrowed: what a Work has of these. */
static PyObject *opts_of(const call *c) { return c->opts ? c->opts : Py_None; }
static PyObject *kept_of(const call *c) { return c->in.tensors ? c->in.tensors : Py_None; }

/* As flight_recorder.Entry has it. */
static PyObject *entry_of(const call *c, PyObject *name) {
    const calls_object *g = c->group;
    PyObject *inputs = c->in.shapes ? c->in.shapes : c->out.shapes;
    return Py_BuildValue("OOKKNOOL", g->subject, name, g->sequence + !is_message(c), g->messages + is_message(c),
                         peer_of(c), inputs, c->out.shapes, epoch_ns());
}

static int count(call *c, PyObject *name, PyObject *entry) {
    PyObject *doing = PyTuple_Pack(2, c->self, name);
    if (!doing || PyDict_SetItem(bridge_state.activity, interned.last, doing)) return Py_XDECREF(doing), 0;
    Py_DECREF(doing);
    if (is_message(c)) {
        c->group->messages++;
    } else {
        PyObject *before = c->group->last;
        c->group->sequence++;
        Py_INCREF(entry);
        c->group->last = entry;
        Py_XDECREF(before);
    }
    return 1;
}

/* Whether code is the user's, by the name of its file; -1: an exception. Others' is the same few functions. */
static int is_users(PyObject *code) {
    static PyObject *others[64];
    PyObject **known = &others[(uintptr_t)code >> 5 & 63];
    if (*known == code) return 0;
    PyObject *file = PyObject_GetAttr(code, interned.file);
    if (!file) return -1;
    int users = 1;
    for (Py_ssize_t i = 0; users && i < PyTuple_Size(bridge_state.not_the_users); i++)
        if (PyUnicode_Tailmatch(file, PyTuple_GetItem(bridge_state.not_the_users, i), 0, PY_SSIZE_T_MAX, -1)) users = 0;
    Py_DECREF(file);
    if (users) return 1;
    PyObject *before = *known;
    *known = shared(code);
    Py_XDECREF(before);
    return 0;
}

/* The calls of the user's program that led here, the innermost first: code, instruction, code, instruction ... The line
 * would have to be counted from the function's first. */
PyObject *mpp_user_frames(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *frames = PyList_New(0), *frame = bridge_state.not_the_users ? (PyObject *)PyEval_GetFrame() : NULL;
    Py_XINCREF(frame);
    while (frames && frame && frame != Py_None && PyList_Size(frames) < 2 * MOST_FRAMES) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame), *at = NULL, *back = NULL;
        int users = is_users(code);
        if (users > 0) at = PyObject_GetAttr(frame, interned.instruction);
        if (users == 0 || (at && !PyList_Append(frames, code) && !PyList_Append(frames, at)))
            back = PyObject_GetAttr(frame, interned.back);
        Py_XDECREF(at);
        Py_DECREF(code);
        Py_DECREF(frame);
        frame = back;
        if (!back) Py_CLEAR(frames);
    }
    Py_XDECREF(frame);
    return frames;
}

static int record(PyObject *entry) {
    PyObject *recorder = PyDict_GetItemWithError(bridge_state.recorder, interned.current);
    if (!recorder || recorder == Py_None) return !PyErr_Occurred();
    Py_INCREF(recorder);
    PyObject *done = PyObject_CallMethodObjArgs(recorder, interned.append, entry, NULL);
    Py_DECREF(recorder);
    Py_XDECREF(done);
    return done != NULL;
}

/* flight_recorder.of_pending() */
static int record_pending(PyObject *entry, PyObject *work) {
    PyObject *recorder = PyDict_GetItemWithError(bridge_state.recorder, interned.current);
    if (!recorder || recorder == Py_None) return !PyErr_Occurred();
    PyObject *more = Py_BuildValue("NN", PyWeakref_NewRef(work, NULL), mpp_user_frames(NULL, NULL));
    PyObject *all = more ? PySequence_Concat(entry, more) : NULL;
    int is_recorded = all && record(all);
    Py_XDECREF(more);
    Py_XDECREF(all);
    return is_recorded;
}

/* ---- what becomes of it ---- */

/* torch's functions ask whether there is a Work before they wait for it, if they were not to be asynchronous. Others do
 * not ask, and C++ makes a null pointer of None. */
static int does_without(const call *c) {
    PyFrameObject *frame = c->sync ? PyEval_GetFrame() : NULL;
    PyObject *code = frame ? (PyObject *)PyFrame_GetCode(frame) : NULL;
    int found = 0;
    for (Py_ssize_t i = 0; code && !found && i < PyTuple_Size(bridge_state.front_end); i++)
        found = code == PyTuple_GetItem(bridge_state.front_end, i);
    Py_XDECREF(code);
    return found;
}

static PyObject *complete_work(const call *c) {
    if (does_without(c)) return shared(Py_None);
    PyObject *work = PyObject_CallNoArgs(bridge_state.work);
    if (work && PyObject_SetAttr(work, interned.tensors, c->out.tensors)) Py_CLEAR(work);
    return work;
}

/* Steals the value. */
static int set(PyObject *work, PyObject *name, PyObject *value) {
    int is_set = value && !PyObject_SetAttr(work, name, value);
    Py_XDECREF(value);
    return is_set;
}

/* A PendingWork with what engine/work.py says that every one has. */
static PyObject *pending_work(const call *c, PyObject *name, PyObject *handle) {
    const calls_object *g = c->group;
    PyObject *work = PyObject_CallNoArgs(bridge_state.pending);
    unsigned long long number = is_message(c) ? g->messages : g->sequence;
    int is_made = work && set(work, interned.handle, shared(handle)) && set(work, interned.group, shared(c->self)) &&
                  set(work, interned.name, shared(name)) &&
                  set(work, interned.number, PyLong_FromUnsignedLongLong(number)) &&
                  set(work, interned.peer, peer_of(c)) && set(work, interned.opts, shared(opts_of(c))) &&
                  set(work, interned.limit, PyFloat_FromDouble(g->timeout)) &&
                  set(work, interned.started, PyFloat_FromDouble(1e-9 * (double)now_ns())) &&
                  set(work, interned.tensors, shared(c->out.tensors)) && set(work, interned.keep, shared(kept_of(c))) &&
                  set(work, interned.lock, PyObject_CallNoArgs(bridge_state.lock));
    if (!is_made) Py_CLEAR(work);
    return work;
}

/* An asynchronous operation's Work: in the registry, and to be completed in the background if nobody waits for it. */
static PyObject *own(const call *c, PyObject *name, PyObject *entry, PyObject *handle) {
    uintptr_t op = (uintptr_t)PyLong_AsUnsignedLongLong(handle);
    PyObject *work = pending_work(c, name, handle);
    if (!work || PyDict_SetItem(bridge_state.registry, handle, work)) return Py_XDECREF(work), NULL;
    PyThreadState *gil = PyEval_SaveThread();
    mpp_engine->claim(op);
    int is_pending = mpp_engine->notify_on_completion(op, c->bytes > QUIET_BYTES);
    PyEval_RestoreThread(gil);
    if (!record_pending(entry, work)) PyErr_WriteUnraisable(work); /* the operation goes on all the same */
    if (!is_pending) {
        PyObject *watched = PyObject_CallFunctionObjArgs(bridge_state.watch, work, NULL); /* completes it */
        if (!watched) PyErr_WriteUnraisable(work);
        Py_XDECREF(watched);
    }
    return work;
}

/* The operation is C's, and has no Work: engine/engine.py says how it gets one. */
static void adopt_orphan(const call *c, PyObject *name) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *lost =
        Py_BuildValue("OONOOOOO", c->self, name, peer_of(c), opts_of(c), c->out.tensors, Py_None, kept_of(c), Py_None);
    if (lost && !PyList_Append(bridge_state.interrupted, lost))
        Py_XDECREF(PyObject_CallFunction(bridge_state.recover, "Oi", lost, 0));
    Py_XDECREF(lost);
    if (PyErr_Occurred()) PyErr_WriteUnraisable(c->self);
    PyErr_Restore(type, error, traceback);
}

static PyObject *incomplete_work(const call *c, PyObject *name, PyObject *entry, uintptr_t op) {
    PyObject *handle = PyLong_FromUnsignedLongLong(op), *work = NULL;
    if (handle && !c->sync && bridge_state.is_watched) {
        work = own(c, name, entry, handle);
    } else if (handle) {
        PyObject *peer = peer_of(c), *go_on = PyObject_GetAttr(c->self, interned.go_on);
        if (peer && go_on)
            work = PyObject_CallFunctionObjArgs(go_on, handle, name, peer, opts_of(c), c->out.tensors, kept_of(c),
                                                entry, c->sync ? Py_True : Py_False, NULL);
        Py_XDECREF(peer);
        Py_XDECREF(go_on);
    }
    Py_XDECREF(handle);
    if (!work) adopt_orphan(c, name);
    return work;
}

/* torch's recv() is irecv() and wait() to a group, and send() likewise. Polling for the message before a Work is made
 * saves half of the call where wait() follows at once, and holds up whoever has something else to do: so only where it
 * did, the last times. */
enum { SURE = 2, PATIENCE_NS = 50000 };

static struct {
    uintptr_t op; /* of any group's calls the last asynchronous one, if it is a message that nobody has waited for */
    int64_t begun;
    int waited_for; /* so many in a row, at once; at most SURE */
} last_message;

static int64_t patience(const call *c) {
    if (c->sync) return MPP_SLICE_NS;
    if (last_message.op) last_message.waited_for = 0;
    last_message.op = 0;
    if (c->peer == ANY_PEER) return -1; /* even if it is complete it must be asked where it came from */
    return is_message(c) && last_message.waited_for == SURE ? PATIENCE_NS : 0;
}

static void note_message(const call *c, uintptr_t op) {
    if (!op || !is_message(c)) return;
    last_message.op = op;
    last_message.begun = now_ns();
}

static void note_wait(uintptr_t op) {
    if (!op || op != last_message.op) return;
    last_message.op = 0;
    if (now_ns() - last_message.begun >= 2 * PATIENCE_NS) last_message.waited_for = 0;
    else if (last_message.waited_for < SURE) last_message.waited_for++;
}

static PyObject *start(call *c, PyObject *name) {
    PyObject *entry = entry_of(c, name), *work;
    if (!entry || !count(c, name, entry)) return Py_XDECREF(entry), NULL;
    c->group->in_c++;
    int64_t wait_ns = patience(c);
    PyThreadState *gil = PyEval_SaveThread();
    uintptr_t op = c->start(c, wait_ns);
    PyEval_RestoreThread(gil);
    note_message(c, op);
    if (op) work = incomplete_work(c, name, entry, op);
    else work = record(entry) ? complete_work(c) : NULL;
    Py_DECREF(entry);
    return work;
}

/* ---- Method: a method of a group ---- */

static int is_unset(const PyObject *member) { return !member || member == Py_None; }

/* Whether C may begin something for this group now. */
static calls_object *ready_calls(PyObject *self) { /* a new reference */
    PyObject *found = bridge_state.is_ready ? PyObject_GetAttr(self, interned.calls) : NULL;
    if (!found) return PyErr_Clear(), NULL;
    calls_object *g = (calls_object *)found;
    if ((PyObject *)Py_TYPE(found) == bridge_state.calls && !g->python_only && !g->compares && is_unset(g->broken) &&
        is_unset(g->coalescing) && g->subject && PyList_Size(g->extensions) == 0 &&
        PyList_Size(bridge_state.interrupted) == 0)
        return g;
    PyErr_Clear();
    Py_DECREF(found);
    return NULL;
}

/* Whether a profiler, or a TorchDispatchMode, is to see the calls of this thread. */
static int is_watched_by_torch(void) {
    PyObject *answer = PyObject_CallNoArgs(bridge_state.is_profiled);
    int yes = answer != Py_False;
    Py_XDECREF(answer);
    if (answer && !yes) {
        answer = PyObject_CallNoArgs(bridge_state.modes);
        yes = !answer || PyLong_AsLong(answer) != 0;
        Py_XDECREF(answer);
    }
    if (yes) PyErr_Clear();
    return yes;
}

/* torch calls barrier(opts=...): the arguments as if it were not named. NULL: other names. */
static PyObject *unnamed(PyObject *args, PyObject *named) {
    if (!named || PyDict_Size(named) == 0) return shared(args);
    PyObject *opts = PyDict_Size(named) == 1 ? PyDict_GetItemWithError(named, interned.opts_word) : NULL;
    Py_ssize_t given = PyTuple_Size(args);
    PyObject *all = opts ? PyTuple_New(given + 1) : NULL;
    if (!all) return PyErr_Clear(), NULL;
    for (Py_ssize_t i = 0; i < given; i++) PyTuple_SetItem(all, i, shared(PyTuple_GetItem(args, i)));
    PyTuple_SetItem(all, given, shared(opts));
    return all;
}

PyObject *mpp_call_operation(PyObject *self, PyObject *args, PyObject *named) {
    const mpp_method *m = (const mpp_method *)self;
    PyObject *all = PyTuple_Size(args) ? unnamed(args, named) : NULL, *work = NULL;
    call c = {.self = all ? PyTuple_GetItem(all, 0) : NULL, .peer = NO_PEER, .root = -1};
    int is_read = all && (c.group = ready_calls(c.self)) && !is_watched_by_torch() && mpp_read_call(&c, m, all);
    if (is_read) work = start(&c, m->name);
    mpp_forget(&c);
    Py_XDECREF((PyObject *)c.group);
    Py_XDECREF(all);
    return is_read ? work : PyObject_Call(m->python, args, named);
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
    int open = finished == Py_False;
    Py_XDECREF(finished);
    for (int i = 0; open && i < UNSET; i++) open = is_none(work, interned.unset[i]);
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
    int is_over =
        bridge_state.is_ready &&
        (type == bridge_state.work || (type == bridge_state.pending && bridge_state.is_watched && wait_a_slice(work)));
    return shared(is_over ? Py_True : Py_False);
}
