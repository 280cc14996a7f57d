/* Where the program calls what, for the timeline: each place, group, operation, dtype and reduction together has a
 * number, its kind, which Python gives out (timeline/recording.py) and this remembers. */
#include <string.h>

#include "python/call.h"

enum { KNOWN = 1024, AVERAGES = 64, OF_PYTHON = 128 };

typedef struct {
    PyObject *code, *subject, *name, *dtype; /* kept, so that none is taken for another at its address */
    long at;
    int op, kind;
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
int mpp_is_users(PyObject *code) {
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

/* The innermost of the user's; a new reference, or NULL. `code` is borrowed, as the frame's. */
static PyObject *users_frame(PyObject **code) {
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame && frame != Py_None) {
        *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        Py_DECREF(*code);
        if (mpp_is_users(*code) > 0) return frame;
        PyObject *back = PyObject_GetAttr(frame, interned.back);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    return NULL;
}

static long instruction_of(PyObject *frame) {
    PyObject *at = frame ? PyObject_GetAttr(frame, interned.instruction) : NULL;
    long found = at ? PyLong_AsLong(at) : -1;
    Py_XDECREF(at);
    return found;
}

/* C's number of the reduction, or from OF_PYTHON on torch's, which is its hash. */
static int op_of(const call *c) {
    if (!c->function && !c->how.has_premul) return c->how.divisor > 1 ? AVERAGES + c->how.op : c->how.op;
    PyObject *op = c->opts ? PyObject_GetAttrString(c->opts, "reduceOp") : NULL;
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
    site before = *where;
    *where = *s;
    Py_XINCREF(s->code);
    Py_INCREF(s->subject);
    Py_INCREF(s->name);
    Py_INCREF(s->dtype);
    Py_XDECREF(before.code);
    Py_XDECREF(before.subject);
    Py_XDECREF(before.name);
    Py_XDECREF(before.dtype);
}

static int kind_from_python(const site *s, PyObject *frame) {
    PyObject *code = frame ? s->code : Py_None;
    int line = frame ? PyFrame_GetLineNumber((PyFrameObject *)frame) : 0;
    PyObject *number = PyObject_CallFunction(kind_of, "OiOOOi", code, line, s->subject, s->name, s->dtype, s->op);
    int kind = number ? (int)PyLong_AsLong(number) : 0;
    Py_XDECREF(number);
    if (PyErr_Occurred()) PyErr_WriteUnraisable(kind_of);
    return kind;
}

/* Of the call that has begun on this thread. */
void mpp_note_site(const call *c, uint64_t sequence) {
    if (!kind_of) return;
    site s = {.subject = c->group->subject, .name = c->name, .dtype = dtype_of(c), .op = op_of(c)};
    PyObject *frame = users_frame(&s.code);
    if (!frame) s.code = NULL;
    s.at = instruction_of(frame);
    PyErr_Clear();
    uintptr_t hash = (uintptr_t)s.code / 16 * 31 + (uintptr_t)s.at * 7 + (uintptr_t)s.name / 16 +
                     (uintptr_t)s.subject / 16 * 5 + (uintptr_t)s.dtype / 16 * 3 + (uintptr_t)s.op;
    site *where = &known[(hash ^ hash >> 10) % KNOWN];
    if (where->code == s.code && where->at == s.at && where->subject == s.subject && where->name == s.name &&
        where->dtype == s.dtype && where->op == s.op) {
        s.kind = where->kind;
    } else {
        s.kind = kind_from_python(&s, frame);
        remember(where, &s);
    }
    Py_XDECREF(frame);
    mpp_engine->call_is(s.kind, sequence, c->sync);
}

/* `entry` has the call's number. */
void mpp_note_work(PyObject *work, PyObject *entry) {
    if (kind_of && PyObject_SetAttr(work, interned.call, PyTuple_GetItem(entry, 7))) PyErr_Clear();
}

PyObject *mpp_asked_for(PyObject *module, PyObject *future) {
    (void)module;
    mpp_note_asked_for(future);
    Py_RETURN_NONE;
}

void mpp_note_asked_for(PyObject *work) {
    PyObject *number = kind_of ? PyObject_GetAttr(work, interned.call) : NULL;
    if (number) mpp_engine->call_asked_for(PyLong_AsUnsignedLongLong(number));
    Py_XDECREF(number);
    PyErr_Clear();
}
