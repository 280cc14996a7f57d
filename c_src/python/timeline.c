/* Where the program calls what, for the timeline: each place, group, operation, dtype and reduction together has a
 * number, its kind, which Python gives out (timeline/recording.py) and this remembers. */
#include <string.h>

#include "python/call.h"

enum { KNOWN = 1024, AVERAGES = 64, OF_PYTHON = 128, MOST_FRAMES = 16 };

typedef struct {
    PyObject *code, *subject, *name, *dtype; /* kept, so that none is taken for another at its address */
    long at, op;                             /* up to here what tells it from others, without gaps */
    int kind;
} site;

static PyObject *kind_of; /* Python's function; NULL: there is no timeline */
static site known[KNOWN];

PyObject *mpp_set_timeline(PyObject *module, PyObject *function) {
    (void)module;
    PyObject *before = kind_of;
    kind_of = function == Py_None ? NULL : function;
    Py_XINCREF(kind_of);
    Py_XDECREF(before);
    memset(known, 0, sizeof known); /* numbers are another timeline's; what it kept stays */
    Py_RETURN_NONE;
}

/* Whether code is the user's, by the name of its file; -1: an exception. The same few functions are asked about. */
static int is_users(PyObject *code) {
    static struct {
        PyObject *code; /* kept */
        int users;
    } asked[128];
    __typeof__(&asked[0]) last = &asked[(uintptr_t)code >> 5 & 127];
    if (last->code == code) return last->users;
    PyObject *file = PyObject_GetAttr(code, interned.file);
    if (!file) return -1;
    int users = 1;
    for (Py_ssize_t i = 0; users && i < PyTuple_Size(bridge_state.not_the_users); i++)
        if (PyUnicode_Tailmatch(file, PyTuple_GetItem(bridge_state.not_the_users, i), 0, PY_SSIZE_T_MAX, -1)) users = 0;
    Py_DECREF(file);
    PyObject *before = last->code;
    Py_INCREF(code);
    last->code = code;
    last->users = users;
    Py_XDECREF(before);
    return users;
}

/* An attribute of frames, got as often as there are calls: without the search for it that PyObject_GetAttr makes. */
static PyObject *attribute(PyObject *frame, PyObject *name, PyObject **known) {
    if (!*known && !(*known = PyObject_GetAttr((PyObject *)Py_TYPE(frame), name))) return NULL;
    descrgetfunc get = (descrgetfunc)PyType_GetSlot(Py_TYPE(*known), Py_tp_descr_get);
    return get(*known, frame, (PyObject *)Py_TYPE(frame));
}

static PyObject *caller_of(PyObject *frame) { /* in place of the frame; NULL: there is none, or an exception */
    static PyObject *back;
    PyObject *found = attribute(frame, interned.back, &back);
    Py_DECREF(frame);
    if (found == Py_None) Py_CLEAR(found);
    return found;
}

static PyObject *instruction_of(PyObject *frame) {
    static PyObject *at;
    return attribute(frame, interned.instruction, &at);
}

/* The innermost of the user's from a frame on, in its place; NULL: there is none, or an exception. `code` is borrowed
 * from it. */
static PyObject *users_frame(PyObject *frame, PyObject **code) {
    while (frame) {
        *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        Py_DECREF(*code);
        int users = is_users(*code);
        if (users > 0) return frame;
        if (users < 0) return Py_DECREF(frame), NULL;
        frame = caller_of(frame);
    }
    return NULL;
}

static PyObject *this_frame(void) { /* a new reference; NULL: there is none, or Python is not connected */
    PyObject *frame = bridge_state.not_the_users ? (PyObject *)PyEval_GetFrame() : NULL;
    Py_XINCREF(frame);
    return frame;
}

/* The calls of the user's program that led here, the innermost first: code, instruction, code, instruction ... The line
 * would have to be counted from the function's first. */
PyObject *mpp_user_frames(void) {
    PyObject *frames = PyList_New(0), *code, *frame = users_frame(this_frame(), &code);
    while (frames && frame) {
        PyObject *at = instruction_of(frame);
        int is_kept = at && !PyList_Append(frames, code) && !PyList_Append(frames, at);
        Py_XDECREF(at);
        if (!is_kept || PyList_Size(frames) >= 2 * MOST_FRAMES) break;
        frame = users_frame(caller_of(frame), &code);
    }
    Py_XDECREF(frame);
    if (PyErr_Occurred()) Py_CLEAR(frames);
    return frames;
}

/* C's number of the reduction, or from OF_PYTHON on torch's, which is its hash. */
static int op_of(const call *c) {
    if (!c->how.has_premul) return c->how.divisor > 1 ? AVERAGES + c->how.op : c->how.op;
    PyObject *op = c->opts ? PyObject_GetAttr(c->opts, interned.reduce_op) : NULL;
    Py_hash_t number = op ? PyObject_Hash(op) : -1;
    Py_XDECREF(op);
    PyErr_Clear();
    return number < 0 ? OF_PYTHON - 1 : OF_PYTHON + (int)(number & 63);
}

static PyObject *dtype_of(const call *c) {
    PyObject *shapes = c->out.shapes ? c->out.shapes : c->in.shapes;
    return shapes && PyTuple_Size(shapes) ? PyTuple_GetItem(PyTuple_GetItem(shapes, 0), 1) : Py_None;
}

static void remember(site *where, const site *s) {
    PyObject *after[] = {s->code, s->subject, s->name, s->dtype},
             *before[] = {where->code, where->subject, where->name, where->dtype};
    *where = *s;
    for (int i = 0; i < 4; i++) Py_XINCREF(after[i]);
    for (int i = 0; i < 4; i++) Py_XDECREF(before[i]);
}

static int kind_from_python(const site *s, PyObject *frame) {
    PyObject *code = frame ? s->code : Py_None;
    int line = frame ? PyFrame_GetLineNumber((PyFrameObject *)frame) : 0;
    PyObject *number = PyObject_CallFunction(kind_of, "OiOOOl", code, line, s->subject, s->name, s->dtype, s->op);
    int kind = number ? (int)PyLong_AsLong(number) : 0;
    Py_XDECREF(number);
    if (PyErr_Occurred()) PyErr_WriteUnraisable(kind_of);
    return kind;
}

/* Of the call that has begun on this thread. */
void mpp_note_site(const call *c, uint64_t sequence) {
    if (!kind_of) return;
    site s = {.subject = c->group->subject, .name = c->name, .dtype = dtype_of(c), .op = op_of(c)};
    PyObject *frame = users_frame(this_frame(), &s.code), *at = frame ? instruction_of(frame) : NULL;
    if (!frame) s.code = NULL;
    s.at = at ? PyLong_AsLong(at) : -1;
    Py_XDECREF(at);
    PyErr_Clear();
    uintptr_t hash = (uintptr_t)s.code / 16 * 31 + (uintptr_t)s.at * 7 + (uintptr_t)s.name / 16 +
                     (uintptr_t)s.subject / 16 * 5 + (uintptr_t)s.dtype / 16 * 3 + (uintptr_t)s.op;
    site *where = &known[(hash ^ hash >> 10) % KNOWN];
    if (!memcmp(where, &s, offsetof(site, kind))) {
        s.kind = where->kind;
    } else {
        s.kind = kind_from_python(&s, frame);
        remember(where, &s);
    }
    Py_XDECREF(frame);
    mpp_engine->call_is(s.kind, sequence, c->sync);
}

/* Of a call that was complete at once; others' Works have the record anyway. */
void mpp_note_work(PyObject *work, call_object *record) {
    if (kind_of && PyObject_SetAttr(work, interned.call, (PyObject *)record)) PyErr_Clear();
}

PyObject *mpp_asked_for(PyObject *module, PyObject *future) {
    (void)module;
    mpp_note_asked_for(future);
    Py_RETURN_NONE;
}

void mpp_note_asked_for(PyObject *work) {
    PyObject *record = kind_of ? PyObject_GetAttr(work, interned.call) : NULL;
    if (record && (PyObject *)Py_TYPE(record) == bridge_state.call)
        mpp_engine->call_asked_for(((call_object *)record)->number);
    Py_XDECREF(record);
    PyErr_Clear();
}
