/* From the operands of a call to the engine and back: counted, recorded, started, made a Work.
 *
 * `Method` is a method of a group, and reads the operands itself, without a line of Python. Where that cannot be done
 * (another kind of tensor, another form of the arguments, wrong ones) it calls a function of Python's, which makes
 * plain tensors of what it is given, and comes back by mpp_start_plain, which says what is wrong. Where the group or
 * the thread is special (a profiler, a group that is broken or collects operations, CUDA tensors) Python is asked
 * before an operation begins, and told of its Work.
 *
 * Rules: a call counts only when nothing can keep it from being started; no Python code runs between that and the
 * operation's entry in the registry, whose owner it is from then on; the GIL is free while the engine is at work. */
#include "python/call.h"

#include "engine/pause.h"

enum { QUIET_BYTES = 65536 };

mpp_bridge_state bridge_state;
mpp_interned interned;

/* ---- what is noted of a call ---- */

static PyObject *or_none(PyObject *object) { return object ? object : Py_None; }

/* Borrowed: what a Work has of these. */
static PyObject *results_of(const call *c) { return c->results ? c->results : c->out.tensors; }
static PyObject *kept_of(const call *c) { return or_none(c->keep ? c->keep : c->in.tensors); }

/* Where the group compares calls in detail: the other exchange, or other numbers of as many bytes, are another call. 0,
 * with an exception: no memory. */
static int tell_details(const call *c) {
    if (!c->group->compares || mpp_is_message(c)) return 1;
    PyObject *words = PyUnicode_FromFormat("%U %S", c->name, c->a.type ? c->a.type->dtype : Py_None);
    const char *text = words ? PyUnicode_AsUTF8AndSize(words, NULL) : NULL;
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (const char *at = text; at && *at; at++) hash = (hash ^ (unsigned char)*at) * 0x100000001b3u;
    mpp_engine->call_details(hash);
    Py_XDECREF(words);
    return text != NULL;
}

static PyObject *lengths_of(const call *c) {
    Py_ssize_t count = c->lengths ? 2 * c->group->size : 0;
    PyObject *all = PyList_New(count);
    for (Py_ssize_t i = 0; all && i < count; i++) PyList_SetItem(all, i, PyLong_FromSize_t(c->lengths[i]));
    return all;
}

static call_object *record_of(const call *c) {
    const calls_object *g = c->group;
    call_object *r = (call_object *)PyType_GenericAlloc((PyTypeObject *)bridge_state.call, 0);
    if (!r) return NULL;
    r->subject = shared(g->subject);
    r->operation = shared(c->name);
    r->inputs = shared(c->in.shapes ? c->in.shapes : c->out.shapes);
    r->outputs = shared(c->out.shapes);
    r->peer = mpp_is_message(c) ? PyLong_FromLong(c->o.peer) : shared(Py_None);
    r->tag = mpp_is_message(c) && c->o.of == g->handle ? (unsigned long long)c->o.tag : 0; /* a window has none */
    r->lengths = g->compares ? lengths_of(c) : NULL;
    r->collective = g->sequence + !mpp_is_message(c);
    r->message = g->messages + mpp_is_message(c);
    r->sequence = mpp_is_message(c) ? r->message : r->collective;
    r->limit = g->timeout;
    r->extension = c->extension;
    r->begun = (unsigned long long)now_ns();
    r->number = mpp_engine->call_begins((int64_t)r->begun);
    return r;
}

static void keep_as(PyObject **last, call_object *record) {
    PyObject *before = *last;
    *last = shared((PyObject *)record);
    Py_XDECREF(before);
}

static void count(call *c, call_object *record) {
    c->group->sequence = record->collective;
    c->group->messages = record->message;
    keep_as(&bridge_state.last, record);
    if (!mpp_is_message(c)) keep_as(&c->group->last, record);
}

PyObject *mpp_last_call(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return shared(or_none(bridge_state.last));
}

/* For the flight recorder: also of a call that goes on with its Work who has called it; NULL: it is complete. */
static int keep(call_object *record, PyObject *work) {
    PyObject *recorder = PyDict_GetItemWithError(bridge_state.recorder, interned.current), *done = NULL;
    if (!recorder || recorder == Py_None) return !PyErr_Occurred();
    Py_INCREF(recorder);
    if (work) {
        record->work = PyWeakref_NewRef(work, NULL);
        record->frames = mpp_user_frames();
    }
    if (!work || (record->work && record->frames))
        done = PyObject_CallMethodObjArgs(recorder, interned.append, record, NULL);
    Py_DECREF(recorder);
    Py_XDECREF(done);
    return done != NULL;
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

static PyObject *complete_work(const call *c, const call_object *record) {
    if (!c->is_special && does_without(c)) return shared(Py_None);
    PyObject *work = PyObject_CallNoArgs(bridge_state.work);
    int is_received = c->start == offsetof(mpp_entries, recv); /* there is no operation left to ask from whom */
    if (work && (PyObject_SetAttr(work, interned.tensors, results_of(c)) ||
                 (is_received && PyObject_SetAttr(work, interned.source, record->peer))))
        Py_CLEAR(work);
    return work;
}

/* The group is needed for a second half. */
static int announce_second_half(const call *c) {
    PyObject *halves = PyObject_GetAttr(c->self, interned.second_halves);
    int is_known = halves && !PySet_Add(halves, c->then);
    Py_XDECREF(halves);
    return is_known;
}

/* What engine/work.py says that every PendingWork has. */
static int describe(PyObject *work, const call *c, call_object *record, PyObject *handle) {
    return set(work, interned.handle, shared(handle)) && set(work, interned.group, shared(c->self)) &&
           set(work, interned.call, shared((PyObject *)record)) && set(work, interned.opts, shared(or_none(c->opts))) &&
           set(work, interned.tensors, shared(results_of(c))) && set(work, interned.keep, shared(kept_of(c))) &&
           set(work, interned.lock, PyObject_CallNoArgs(bridge_state.lock)) &&
           (!c->finish || set(work, interned.finish, shared(c->finish))) &&
           (!c->then || (set(work, interned.then, shared(c->then)) && announce_second_half(c))) &&
           (!c->sync || set(work, interned.caller, PyLong_FromUnsignedLong(PyThread_get_thread_ident())));
}

/* The Work of an operation that goes on, in the registry. Without memory for one nobody can wait for the operation; its
 * tensors are kept for ever, as others may write to them. `is_notified`: the background completes it if nobody waits.
 */
static PyObject *own(const call *c, call_object *record, uintptr_t op, int *is_notified) {
    PyObject *handle = PyLong_FromUnsignedLongLong(op), *work = PyObject_CallNoArgs(bridge_state.pending);
    int is_owned =
        handle && work && describe(work, c, record, handle) && !PyDict_SetItem(bridge_state.registry, handle, work);
    if (!is_owned) {
        Py_INCREF(results_of(c));
        Py_INCREF(c->out.tensors);
        Py_INCREF(kept_of(c));
        Py_XINCREF(c->then);
        Py_CLEAR(work);
    }
    Py_XDECREF(handle);
    int has_consequences = c->finish || c->then || c->bytes > QUIET_BYTES;
    *is_notified = is_owned && !c->sync && bridge_state.is_watched;
    if (!*is_notified) return work;
    PyThreadState *gil = PyEval_SaveThread();
    *is_notified = mpp_engine->notify_on_completion(op, has_consequences);
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

static PyObject *incomplete_work(const call *c, call_object *record, uintptr_t op) {
    int is_notified;
    PyObject *work = own(c, record, op, &is_notified);
    if (!work) return NULL;
    if (!keep(record, work)) PyErr_WriteUnraisable(work); /* the operation goes on all the same */
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

static uintptr_t call_engine(call *c) {
    starter *start = *(starter *const *)((const char *)mpp_engine + c->start);
    c->o.wait_ns = mpp_patience(c);
    PyThreadState *gil = PyEval_SaveThread();
    uintptr_t op = start(&c->o);
    PyEval_RestoreThread(gil);
    mpp_note_message(c, op);
    return op;
}

static PyObject *start(call *c) {
    call_object *record = record_of(c);
    PyObject *work = NULL;
    if (!record || PyErr_Occurred() || !tell_details(c)) {
        mpp_engine->call_returns(0);
        Py_XDECREF((PyObject *)record);
        return NULL;
    }
    count(c, record);
    mpp_note_site(c, record->sequence);
    uintptr_t op = call_engine(c);
    mpp_engine->call_returns(!op);
    if (op) work = incomplete_work(c, record, op);
    else if (is_in_place(c) && keep(record, NULL)) work = complete_work(c, record);
    if (!op && work && work != Py_None) mpp_note_work(work, record);
    Py_DECREF((PyObject *)record);
    return work;
}

static int is_unset(const PyObject *member) { return !member || member == Py_None; }

static calls_object *calls_of(PyObject *self) { /* a new reference; NULL, without an exception: it is no group */
    PyObject *found = PyObject_GetAttr(self, interned.calls);
    if (found && (PyObject *)Py_TYPE(found) == bridge_state.calls) return (calls_object *)found;
    PyErr_Clear();
    Py_XDECREF(found);
    return NULL;
}

static int is_false(PyObject *function) {
    PyObject *answer = PyObject_CallNoArgs(function);
    Py_XDECREF(answer); /* True and False are never freed */
    return answer == Py_False;
}

static int is_special(const call *c) {
    const calls_object *g = c->group;
    int is_plain = bridge_state.is_ready && is_false(bridge_state.is_profiled) &&
                   (c->sync || is_false(bridge_state.is_registering)) && !g->python_only && is_unset(g->broken) &&
                   is_unset(g->coalescing) && PyList_Size(g->extensions) == 0;
    if (!is_plain) PyErr_Clear();
    return !is_plain;
}

/* Whether a TorchDispatchMode is to see the calls of this thread. */
static int has_modes(void) {
    PyObject *answer = PyObject_CallNoArgs(bridge_state.modes);
    int yes = !answer || PyLong_AsLong(answer) != 0;
    Py_XDECREF(answer);
    if (yes) PyErr_Clear();
    return yes;
}

/* ---- calls of which Python is told: prepare() and follow() of group/starting.py ---- */

static PyObject *unless_none(PyObject *given) { return given == Py_None ? NULL : given; }

/* What Python says of the call, a tuple that is to live until it has begun; NULL: it is not to begin. */
static PyObject *prepare(call *c) {
    const mpp_method *m = c->method;
    int other = mpp_is_message(c) ? c->o.peer : c->o.root;
    PyObject *said =
        PyObject_CallFunction(bridge_state.prepare, "OOOOOiNnKO", c->self, c->name, m->start_name,
                              or_none(c->in.tensors), results_of(c), other, lengths_of(c), (Py_ssize_t)c->a.count,
                              (unsigned long long)(m->reduces ? (uintptr_t)&c->how : 0), or_none(c->keep));
    unsigned long long staging, first;
    const char *start;
    PyObject *keep;
    if (said && !PyArg_ParseTuple(said, "KdzKOO", &staging, &c->extension, &start, &first, &c->then, &keep))
        Py_CLEAR(said);
    if (!said) return NULL;
    c->o.staging = staging;
    c->then = unless_none(c->then);
    if (c->then) { /* in two halves */
        c->start = mpp_find_starter(start);
        c->o.first = (const void *)(uintptr_t)first;
        c->keep = keep;
    }
    return said;
}

static PyObject *follow(const call *c, PyObject *work) {
    PyObject *done =
        work ? PyObject_CallFunctionObjArgs(bridge_state.follow, c->self, c->name, work, results_of(c), NULL) : NULL;
    if (work && !done) Py_CLEAR(work);
    Py_XDECREF(done);
    return work;
}

static PyObject *run(call *c) {
    c->is_special = c->is_special || is_special(c) || (c->device && c->device != Py_None);
    if (!c->is_special) return start(c);
    PyObject *said = prepare(c);
    PyObject *work = said ? follow(c, start(c)) : NULL;
    Py_XDECREF(said);
    return work;
}

/* ---- Method: a method of a group ---- */

/* torch calls barrier(opts=...): the arguments as if it were not named. NULL: other names. */
static PyObject *unnamed(PyObject *args, PyObject *named) {
    if (!named || PyDict_Size(named) == 0) return shared(args);
    PyObject *opts = PyDict_Size(named) == 1 ? PyDict_GetItemWithError(named, interned.opts_word) : NULL;
    PyObject *last = opts ? PyTuple_Pack(1, opts) : NULL, *all = last ? PySequence_Concat(args, last) : NULL;
    Py_XDECREF(last);
    if (!all) PyErr_Clear();
    return all;
}

PyObject *mpp_call_operation(PyObject *self, PyObject *args, PyObject *named) {
    const mpp_method *m = (const mpp_method *)self;
    PyObject *all = PyTuple_Size(args) && bridge_state.is_ready ? unnamed(args, named) : NULL, *work = NULL;
    call c = {
        .self = all ? PyTuple_GetItem(all, 0) : NULL, .name = m->name, .method = m, .o = {.peer = NO_PEER, .root = -1}};
    int is_read =
        all && (c.group = calls_of(c.self)) && !c.group->python_only && !has_modes() && mpp_read_call(&c, all);
    if (is_read) {
        work = run(&c);
        c.group->in_c += !c.is_special;
    }
    mpp_forget(&c);
    Py_XDECREF(all);
    return is_read ? work : PyObject_Call(m->python, args, named);
}

/* ---- calls that come from Python ---- */

/* Of a method with `Plain`s for tensors, the results being put in place by `finish`: the Work; NotImplemented, if
 * results lie where is read. */
PyObject *mpp_start_plain(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *method, *operands, *work = NULL;
    call c = {.o = {.peer = NO_PEER, .root = -1}, .is_plain = 1};
    if (!PyArg_ParseTuple(args, "O!O!OOOO", bridge_state.method, &method, &PyTuple_Type, &operands, &c.finish, &c.keep,
                          &c.results, &c.lists))
        return NULL;
    c.method = (const mpp_method *)method;
    c.self = PyTuple_GetItem(operands, 0);
    c.name = c.method->name;
    c.finish = unless_none(c.finish);
    c.keep = unless_none(c.keep);
    c.results = unless_none(c.results);
    if (c.self && (c.group = calls_of(c.self)))
        work = mpp_read_call(&c, operands) ? run(&c) : PyErr_Occurred() ? NULL : shared(Py_NotImplemented);
    if (work && c.results && work != Py_NotImplemented && !set(work, interned.lists, shared(c.lists))) Py_CLEAR(work);
    mpp_forget(&c);
    return work;
}
