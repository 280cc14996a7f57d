/* The extension `_bridge`: its types, and what Python tells it once. What it does is in bridge.c. */
#include <stddef.h>

#include "engine/activity.h"
#include "python/call.h"

#include <structmember.h>

/* ---- Calls: of a group ---- */

#define MEMBER(type, name) {#name, T_##type, offsetof(THIS, name), 0, NULL},
#define OBJECT(name) MEMBER(OBJECT, name)
#define NUMBER(name) MEMBER(ULONGLONG, name)
#define INT(name) MEMBER(INT, name)
#define FLAG(name) MEMBER(BOOL, name)
#define THIS calls_object
static PyMemberDef calls_members[] = {MPP_GROUP_NUMBERS(NUMBER) MPP_GROUP_INTS(INT) MPP_GROUP_FLAGS(FLAG)
                                          MPP_GROUP_OBJECTS(OBJECT) MEMBER(DOUBLE, timeout){0}};
#undef THIS
#define THIS call_object
static PyMemberDef call_members[] = {MPP_CALL_OBJECTS(OBJECT) MPP_CALL_NUMBERS(NUMBER) MEMBER(DOUBLE, limit)
                                         MEMBER(DOUBLE, extension){0}};
#undef THIS

static void clear_members(PyObject *self, const PyMemberDef *members) {
    for (const PyMemberDef *m = members; m->name; m++)
        if (m->type == T_OBJECT) Py_CLEAR(*(PyObject **)((char *)self + m->offset));
}

static int calls_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (const PyMemberDef *m = calls_members; m->name; m++)
        if (m->type == T_OBJECT) Py_VISIT(*(PyObject **)((char *)self + m->offset));
    return 0;
}

static int calls_clear(PyObject *self) { return clear_members(self, calls_members), 0; }

static void calls_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    calls_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "What a group's operations need to know of it, whether they begin in C or in Python."},
    {Py_tp_members, calls_members},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear},
    {Py_tp_dealloc, calls_free},
    {0, NULL},
};

static PyType_Spec calls_spec = {
    .name = "torchmpi_plugin._bridge.Calls",
    .basicsize = sizeof(calls_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = calls_slots,
};

/* ---- Call: the record of one; nothing in it refers to it but by a weak reference ---- */

static void call_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    clear_members(self, call_members);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot call_slots[] = {
    {Py_tp_members, call_members}, {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, call_free}, {0, NULL}};

static PyType_Spec call_spec = {"torchmpi_plugin._bridge.Call", sizeof(call_object), 0, Py_TPFLAGS_DEFAULT, call_slots};

/* ---- Method: as many as operations, for the life of the process ---- */

static PyObject *method_type_of_python; /* types.MethodType */

static void method_free(PyObject *self) {
    const mpp_method *m = (mpp_method *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(m->python);
    Py_DECREF(m->name);
    Py_DECREF(m->start_name);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Method(python, operation, start, roles): operations.py says what the latter are. */
static PyObject *method_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *python, *name, *start_name;
    const char *roles;
    if (named && PyDict_Size(named)) return PyErr_SetString(PyExc_TypeError, "Method takes no names"), NULL;
    if (!PyArg_ParseTuple(args, "OUUs", &python, &name, &start_name, &roles)) return NULL;
    const char *start = PyUnicode_AsUTF8AndSize(start_name, NULL);
    if (!start) return NULL;
    mpp_method *m = (mpp_method *)PyType_GenericAlloc(type, 0);
    if (!m) return NULL;
    m->python = shared(python);
    m->name = shared(name);
    m->start_name = shared(start_name);
    if (!mpp_find_method(m, start, roles)) {
        Py_DECREF(m);
        return PyErr_Format(PyExc_ValueError, "C has no way for %s of %s", start, roles), NULL;
    }
    return (PyObject *)m;
}

/* Not a function of C's for pybind11, which looks for overridden methods that way: bound, it is a plain method. */
static PyObject *method_bind(PyObject *self, PyObject *object, PyObject *type) {
    (void)type;
    if (!object || object == Py_None) return Py_INCREF(self), self;
    return PyObject_CallFunctionObjArgs(method_type_of_python, self, object, NULL);
}

static PyObject *method_attribute(PyObject *self, PyObject *name) { /* __name__, __doc__, __code__: the method's own */
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
    PyErr_Clear();
    return PyObject_GetAttr(((mpp_method *)self)->python, name);
}

static PyMemberDef method_members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(mpp_method, python), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot method_slots[] = {
    {Py_tp_members, method_members},
    {Py_tp_new, method_new},
    {Py_tp_call, mpp_call_operation},
    {Py_tp_descr_get, method_bind},
    {Py_tp_getattro, method_attribute},
    {Py_tp_dealloc, method_free},
    {0, NULL},
};

static PyType_Spec method_spec = {
    .name = "torchmpi_plugin._bridge.Method",
    .basicsize = sizeof(mpp_method),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = method_slots,
};

/* ---- the module ---- */

/* connect(entries, capsule, types, samples, operations, objects): see process_group.py. Without a capsule every tensor
 * goes through Python. */
static PyObject *connect(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address;
    PyObject *capsule, *types, *samples, *operations;
    mpp_bridge_state told = bridge_state;
    if (!PyArg_ParseTuple(args, "KOO!O!O!(OOOOOOO!O!OO!O!OOOOO)", &address, &capsule, &PyTuple_Type, &types,
                          &PyDict_Type, &samples, &PyDict_Type, &operations, &told.work, &told.pending, &told.lock,
                          &told.is_profiled, &told.is_registering, &told.modes, &PyDict_Type, &told.recorder,
                          &PyDict_Type, &told.registry, &told.watch, &PyTuple_Type, &told.not_the_users, &PyTuple_Type,
                          &told.front_end, &told.plain, &told.prepare, &told.follow, &told.premul_factor,
                          &told.reduction))
        return NULL;
    const mpp_entries *entries = (const mpp_entries *)(uintptr_t)address;
    if (entries->size != sizeof *entries)
        return PyErr_SetString(PyExc_RuntimeError, "the extensions are of two builds of mpiplus"), NULL;
    mpp_engine = entries;
    if (!mpp_know_tensors(capsule, types, samples, operations)) return NULL;
    Py_INCREF(args); /* and so all that was told */
    told.is_ready = 1;
    bridge_state = told;
    Py_RETURN_NONE;
}

static PyObject *set_watched(PyObject *module, PyObject *is_watched) {
    (void)module;
    bridge_state.is_watched = is_watched == Py_True;
    Py_RETURN_NONE;
}

static PyObject *disconnect(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    bridge_state.is_ready = bridge_state.is_watched = 0;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"connect", connect, METH_VARARGS, NULL},
    {"disconnect", disconnect, METH_NOARGS, "Let every call come through Python from now on."},
    {"set_watched", set_watched, METH_O, "Whether a thread completes asynchronous operations."},
    {"set_timeline", mpp_set_timeline, METH_O,
     "What numbers the calls for a timeline, or None: timeline/recording.py."},
    {"asked_for", mpp_asked_for, METH_O, "Somebody waits for a future of ours, for the timeline."},
    {"start_plain", mpp_start_plain, METH_VARARGS, "Start an operation on plain tensors: group/operands.py."},
    {"last_call", mpp_last_call, METH_NOARGS, "The last call of this process, or None."},
    {"wait_for", mpp_wait_for, METH_O, "Wait for a Work for a while; whether it is complete, and all is well."},
    {NULL, NULL, 0, NULL},
};

static int intern_names(void) {
#define INTERN(name, text)                                                                                             \
    if (!(interned.name = PyUnicode_InternFromString(text))) return 0;
    MPP_INTERNED(INTERN)
    return 1;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_bridge", .m_size = -1,
                                        .m_methods = functions};

/* One state per process, like MPI itself. */
static int is_main_interpreter(void) {
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return 1;
    PyErr_SetString(PyExc_ImportError, "mpiplus runs in the main interpreter only: MPI is one per process");
    return 0;
}

/* Names by number, None where there is none. */
static int add_names(PyObject *module, const char *what, const char *const *names, Py_ssize_t count) {
    PyObject *all = PyTuple_New(count);
    for (Py_ssize_t i = 0; all && i < count; i++) PyTuple_SetItem(all, i, Py_BuildValue("z", names[i]));
    return all && !PyErr_Occurred() && !PyModule_AddObject(module, what, all);
}

/* What Python needs of the C tables before it knows which shim to load. */
static int add_constants(PyObject *module) {
    const struct {
        const char *name;
        long value;
    } all[] = {{"PENDING", MPP_PENDING}, {"DONE", MPP_DONE},         {"FAILED", MPP_FAILED},
               {"ABORTED", MPP_ABORTED}, {"REPORTED", MPP_REPORTED}, {"SLICE_NS", MPP_SLICE_NS}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (PyModule_AddIntConstant(module, all[i].name, all[i].value)) return 0;
#define TORCH(code, torch, ...) [MPP_##code] = torch,
#define MPI(code, torch, mpi, ...) [MPP_##code] = mpi,
#define REDOP(name) [MPP_##name] = #name,
    static const char *const redops[MPP_REDOP_COUNT] = {MPP_REDOPS(REDOP)};
    static const char *const dtypes[MPP_DTYPE_COUNT] = {MPP_DTYPES(TORCH)};
    static const char *const datatypes[MPP_DTYPE_COUNT] = {MPP_DTYPES(MPI)};
    return add_names(module, "CALLS", mpp_call_names, MPP_CALL_KINDS) &&
           add_names(module, "REDUCTIONS", redops, MPP_REDOP_COUNT) &&
           add_names(module, "DTYPES", dtypes, MPP_DTYPE_COUNT) &&
           add_names(module, "MPI_DATATYPES", datatypes, MPP_DTYPE_COUNT);
}

PyMODINIT_FUNC PyInit__bridge(void) {
    PyObject *module = is_main_interpreter() && intern_names() ? PyModule_Create(&definition) : NULL;
    PyObject *types = module ? PyImport_ImportModule("types") : NULL;
    method_type_of_python = types ? PyObject_GetAttrString(types, "MethodType") : NULL;
    Py_XDECREF(types);
    bridge_state.calls = method_type_of_python ? PyType_FromSpec(&calls_spec) : NULL;
    bridge_state.call = bridge_state.calls ? PyType_FromSpec(&call_spec) : NULL;
    bridge_state.method = bridge_state.call ? PyType_FromSpec(&method_spec) : NULL;
    if (bridge_state.method && add_constants(module) &&
        !PyModule_AddObject(module, "Method", shared(bridge_state.method)) &&
        !PyModule_AddObject(module, "Calls", shared(bridge_state.calls)) &&
        !PyModule_AddObject(module, "Call", shared(bridge_state.call)))
        return module;
    Py_XDECREF(module);
    return NULL;
}
