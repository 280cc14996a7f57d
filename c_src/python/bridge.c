/* From the operands of a call to the engine and back: counted, recorded, started, made a Work.
 *
 * `Method` stands in a class in place of a method written in Python, and reads the operands itself, without a line of
 * Python. It keeps that method: whatever is not plain (another kind of tensor, wrong arguments, a profiler, a group
 * that is broken or collects operations) it hands over to it, so errors and their words are in one place. The method in
 * Python makes operands of what it is given, and calls mpp_start_operation.
 *
 * Rules: a call counts only when nothing can keep it from being started; no Python code runs between that and the
 * operation's entry in the registry, whose owner it is from then on; the GIL is free while the engine is at work. */
#include "python/call.h"

#include "engine/pause.h"

enum { MOST_FRAMES = 16, QUIET_BYTES = 65536 };

mpp_bridge_state bridge_state;
mpp_interned interned;

/* ---- what is noted of a call ---- */

static PyObject *shared(PyObject *object) {
    Py_INCREF(object);
    return object;
}

static PyObject *peer_of(const call *c) { return mpp_is_message(c) ? PyLong_FromLong(c->peer) : shared(Py_None); }

/* Borrowed: what a Work has of these. */
static PyObject *opts_of(const call *c) { return c->opts ? c->opts : Py_None; }
static PyObject *kept_of(const call *c) { return c->keep ? c->keep : c->in.tensors ? c->in.tensors : Py_None; }

static int is_new_collective(const call *c) { return !mpp_is_message(c) && !c->is_counted; }

/* As flight_recorder.Entry has it. */
static PyObject *entry_of(const call *c) {
    const calls_object *g = c->group;
    PyObject *inputs = c->in.shapes ? c->in.shapes : c->out.shapes;
    return Py_BuildValue("OOKKNOOK", g->subject, c->name, g->sequence + is_new_collective(c),
                         g->messages + mpp_is_message(c), peer_of(c), inputs, c->out.shapes,
                         (unsigned long long)mpp_engine->call_begins());
}

static void count(call *c, PyObject *entry) {
    if (mpp_is_message(c)) {
        c->group->messages++;
        return;
    }
    PyObject *before = c->group->last;
    c->group->sequence += is_new_collective(c);
    c->group->last = shared(entry);
    Py_XDECREF(before);
}

/* What this process is doing, for those that wait for it. */
static int note_activity(const call *c) {
    PyObject *doing = PyTuple_Pack(2, c->self, c->name);
    int is_noted = doing && !PyDict_SetItem(bridge_state.activity, interned.last, doing);
    Py_XDECREF(doing);
    return is_noted;
}

/* The calls of the user's program that led here, the innermost first: code, instruction, code, instruction ... The line
 * would have to be counted from the function's first. */
PyObject *mpp_user_frames(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *frames = PyList_New(0), *frame = bridge_state.not_the_users ? (PyObject *)PyEval_GetFrame() : NULL;
    Py_XINCREF(frame);
    while (frames && frame && frame != Py_None && PyList_Size(frames) < 2 * MOST_FRAMES) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame), *at = NULL, *back = NULL;
        int users = mpp_is_users(code);
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

static PyObject *this_thread(void) { return PyLong_FromUnsignedLong(PyThread_get_thread_ident()); }

/* The group is needed for a second half. */
static int announce_second_half(const call *c) {
    PyObject *halves = PyObject_GetAttr(c->self, interned.second_halves);
    int is_known = halves && !PySet_Add(halves, c->then);
    Py_XDECREF(halves);
    return is_known;
}

/* What engine/work.py says that every PendingWork has. */
static int describe(PyObject *work, const call *c, PyObject *handle) {
    const calls_object *g = c->group;
    unsigned long long number = mpp_is_message(c) ? g->messages : g->sequence;
    return set(work, interned.handle, shared(handle)) && set(work, interned.group, shared(c->self)) &&
           set(work, interned.name, shared(c->name)) &&
           set(work, interned.number, PyLong_FromUnsignedLongLong(number)) && set(work, interned.peer, peer_of(c)) &&
           set(work, interned.opts, shared(opts_of(c))) && set(work, interned.limit, PyFloat_FromDouble(g->timeout)) &&
           set(work, interned.started, PyFloat_FromDouble(1e-9 * (double)now_ns())) &&
           set(work, interned.tensors, shared(c->out.tensors)) && set(work, interned.keep, shared(kept_of(c))) &&
           set(work, interned.lock, PyObject_CallNoArgs(bridge_state.lock)) &&
           (!c->finish || set(work, interned.finish, shared(c->finish))) &&
           (!c->then || (set(work, interned.then, shared(c->then)) && announce_second_half(c))) &&
           (!c->extension || set(work, interned.extension, PyFloat_FromDouble(c->extension))) &&
           (!c->sync || set(work, interned.caller, this_thread()));
}

/* The Work of an operation that goes on, in the registry. Without memory for one nobody can wait for the operation; its
 * tensors are kept for ever, as others may write to them. `is_notified`: the background completes it if nobody waits.
 */
static PyObject *own(const call *c, uintptr_t op, int *is_notified) {
    PyObject *handle = PyLong_FromUnsignedLongLong(op), *work = PyObject_CallNoArgs(bridge_state.pending);
    int is_owned = handle && work && describe(work, c, handle) && !PyDict_SetItem(bridge_state.registry, handle, work);
    if (!is_owned) {
        Py_INCREF(c->out.tensors);
        Py_INCREF(kept_of(c));
        Py_XINCREF(c->then);
        Py_CLEAR(work);
    }
    Py_XDECREF(handle);
    int has_consequences = c->finish || c->then || c->bytes > QUIET_BYTES;
    PyThreadState *gil = PyEval_SaveThread();
    mpp_engine->claim(op);
    *is_notified =
        is_owned && !c->sync && bridge_state.is_watched && mpp_engine->notify_on_completion(op, has_consequences);
    PyEval_RestoreThread(gil);
    return work;
}

static PyObject *watch(PyObject *work) { return PyObject_CallFunctionObjArgs(bridge_state.watch, work, NULL); }

/* An exception from outside, such as Ctrl-C, may come at the first instruction of the wait: then it is for us to have
 * the operation watched. */
static void leave_to_background(PyObject *work) {
    PyObject *type, *error, *traceback, *watched = NULL;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *caller = PyObject_GetAttr(work, interned.caller);
    int is_waiting = caller && PyObject_IsTrue(caller) > 0;
    if (is_waiting && set(work, interned.caller, PyLong_FromLong(0))) watched = watch(work);
    Py_XDECREF(caller);
    Py_XDECREF(watched);
    if (!PyErr_Occurred()) {
        PyErr_Restore(type, error, traceback);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

static PyObject *incomplete_work(const call *c, PyObject *entry, uintptr_t op) {
    int is_notified;
    PyObject *work = own(c, op, &is_notified);
    if (!work) return NULL;
    mpp_note_work(work, entry);
    if (!record_pending(entry, work)) PyErr_WriteUnraisable(work); /* the operation goes on all the same */
    if (is_notified) return work;
    PyObject *done = c->sync ? PyObject_CallMethodObjArgs(work, interned.wait, NULL) : watch(work);
    if (!done) {
        leave_to_background(work);
        Py_CLEAR(work);
    }
    Py_XDECREF(done);
    return work;
}

static int is_in_place(const call *c) { /* the result of an operation that is complete */
    PyObject *done = c->finish ? PyObject_CallNoArgs(c->finish) : shared(Py_None);
    Py_XDECREF(done);
    return done != NULL;
}

/* It lets go of the GIL itself: a function of the shim. */
static int call_function(const call *c, uintptr_t *op) {
    PyObject *handle = PyObject_CallObject(c->function, c->arguments);
    *op = handle ? (uintptr_t)PyLong_AsUnsignedLongLong(handle) : 0;
    Py_XDECREF(handle);
    return !PyErr_Occurred();
}

static int call_engine(const call *c, uintptr_t *op) {
    int64_t wait_ns = mpp_patience(c);
    PyThreadState *gil = PyEval_SaveThread();
    *op = c->start(c, wait_ns);
    PyEval_RestoreThread(gil);
    mpp_note_message(c, *op);
    return 1;
}

static PyObject *start(call *c) {
    PyObject *entry = entry_of(c), *work = NULL;
    uintptr_t op;
    if (!entry) return mpp_engine->call_returns(0), NULL;
    count(c, entry);
    mpp_note_site(c, mpp_is_message(c) ? c->group->messages : c->group->sequence);
    int is_started = c->function ? call_function(c, &op) : call_engine(c, &op);
    mpp_engine->call_returns(is_started && !op);
    if (is_started && op) work = incomplete_work(c, entry, op);
    else if (is_started && is_in_place(c) && record(entry)) work = complete_work(c);
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
        is_unset(g->coalescing) && g->subject && PyList_Size(g->extensions) == 0)
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
    call c = {.self = all ? PyTuple_GetItem(all, 0) : NULL, .name = m->name, .peer = NO_PEER, .root = -1};
    int is_read = all && (c.group = ready_calls(c.self)) && !is_watched_by_torch() && mpp_read_call(&c, m, all);
    if (is_read && note_activity(&c)) {
        c.group->in_c++;
        work = start(&c);
    }
    mpp_forget(&c);
    Py_XDECREF(all);
    return is_read ? work : PyObject_Call(m->python, args, named);
}

/* ---- operands that Python has made: group/starting.py ---- */

static PyObject *unless_none(PyObject *given) { return given == Py_None ? NULL : given; }

PyObject *mpp_start_operation(PyObject *module, PyObject *args) {
    (void)module;
    call c = {.peer = NO_PEER, .bytes = SIZE_MAX};
    PyObject *peer;
    if (!PyArg_ParseTuple(args, "OO!OOO!pOO!OOOOO!O!pd", &c.self, bridge_state.calls, &c.group, &c.name, &c.function,
                          &PyTuple_Type, &c.arguments, &c.sync, &peer, &PyList_Type, &c.out.tensors, &c.opts, &c.finish,
                          &c.keep, &c.then, &PyTuple_Type, &c.in.shapes, &PyTuple_Type, &c.out.shapes, &c.is_counted,
                          &c.extension))
        return NULL;
    c.finish = unless_none(c.finish);
    c.then = unless_none(c.then);
    if (peer != Py_None) c.peer = (int)PyLong_AsLong(peer);
    return PyErr_Occurred() ? NULL : start(&c);
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
        mpp_note_wait(op);
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
    if (type == bridge_state.pending) mpp_note_asked_for(work);
    int is_over =
        bridge_state.is_ready &&
        (type == bridge_state.work || (type == bridge_state.pending && bridge_state.is_watched && wait_a_slice(work)));
    return shared(is_over ? Py_True : Py_False);
}
