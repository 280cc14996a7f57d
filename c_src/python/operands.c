/* What the methods of c10d are given, as the engine takes it: tensors as memory, options as numbers.
 *
 * Whatever is not plain here, be it an error or another kind of tensor, is left to Python, which makes a `Plain` of
 * each tensor (group/operands.py). What is still not taken then is wrong, and an exception says why (mpp_refuse); or
 * there is none, and results lie where is read. */
#include <stdarg.h>

#include "python/call.h"

enum { KINDS = 32, WIDTHS = 8, OPERATIONS = 32, OTHERS = 128 };

const mpp_entries *mpp_engine;
static const dl_exchange *exchange;
static PyObject *tensor_types;                           /* a tuple: no subclasses, which may be anything */
static dtype_info dtypes[KINDS][WIDTHS], others[OTHERS]; /* by DLPack's numbers; of Plains */
typedef struct {
    int is_there, is_average, has_premul;
    int code; /* enum mpp_redop */
} reduction_kind;
static reduction_kind operations[OPERATIONS]; /* by torch's number */

int mpp_refuse(const call *c, const char *kind, const char *format, ...) {
    if (!c->is_plain || PyErr_Occurred()) return 0;
    va_list values;
    va_start(values, format);
    PyObject *words = PyUnicode_FromFormatV(format, values);
    va_end(values);
    PyObject *module = words ? PyImport_ImportModule("torchmpi_plugin.tensors.arguments") : NULL;
    PyObject *type = module ? PyObject_GetAttrString(module, kind) : NULL;
    if (type) PyErr_Format(type, "%U: %U", c->name, words);
    Py_XDECREF(type);
    Py_XDECREF(module);
    Py_XDECREF(words);
    return 0;
}

/* ---- tensors ---- */

static PyObject *constant(PyObject *tensor, PyObject *name) { /* one of its attributes that are never freed; or NULL */
    PyObject *found = PyObject_GetAttr(tensor, name);
    if (!found) PyErr_Clear();
    Py_XDECREF(found);
    return found;
}

/* torch's exception for a sparse tensor takes up to a millisecond, for its backtrace: after one, tensors are asked. */
static int view_of(PyObject *tensor, dl_tensor *view) {
    static int has_failed;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensor_types); i++)
        if (exchange && (PyObject *)Py_TYPE(tensor) == PyTuple_GetItem(tensor_types, i)) {
            if (has_failed && constant(tensor, interned.is_sparse) == Py_True) return 0;
            if (!exchange->view(tensor, view)) return 1;
            PyErr_Clear();
            has_failed = 1;
        }
    return 0;
}

static dtype_info *info_of(const dl_tensor *view) {
    int width = view->bits >= 8 ? __builtin_ctz(view->bits) - 3 : WIDTHS;
    if (view->lanes != 1 || view->code >= KINDS || width >= WIDTHS || (view->bits & (view->bits - 1))) return NULL;
    return &dtypes[view->code][width];
}

static int count_elements(const dl_tensor *view, size_t *count) { /* 0: they do not lie one after the other */
    int64_t expected = 1;
    int is_dense = 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->strides && view->shape[i] != 1 && view->strides[i] != expected) is_dense = 0;
        expected *= view->shape[i];
    }
    *count = (size_t)expected;
    return is_dense || !expected;
}

static int says(PyObject *tensor, PyObject *method) { /* what a method of no arguments answers; 1 also for no answer */
    PyObject *answer = PyObject_CallMethodObjArgs(tensor, method, NULL);
    int yes = answer != Py_False;
    if (!answer) PyErr_Clear();
    Py_XDECREF(answer);
    return yes;
}

/* Of a storage that was freed, as FSDP does it, a tensor's address is its offset alone. Few addresses are so low that
 * it could be; these are asked. */
static int has_memory(PyObject *tensor, const operand *o) {
    static const uintptr_t highest_offset = (uintptr_t)1 << 38;
    if (!o->count || o->address >= highest_offset) return 1;
    PyObject *offset = PyObject_CallMethodObjArgs(tensor, interned.storage_offset, NULL);
    size_t elements = offset ? PyLong_AsSize_t(offset) : 0;
    Py_XDECREF(offset);
    if (PyErr_Occurred()) return PyErr_Clear(), 0;
    return o->address != elements * o->type->size;
}

static PyObject *shape_of(const dl_tensor *view, PyObject *dtype) {
    static PyObject *last; /* of one dimension: the next one is often the same */
    static int64_t its_length;
    int is_flat = view->ndim == 1;
    if (is_flat && last && its_length == view->shape[0] && PyTuple_GetItem(last, 1) == dtype) return shared(last);
    PyObject *shape = PyTuple_New(view->ndim), *length = shape;
    for (int i = 0; length && i < view->ndim; i++)
        if ((length = PyLong_FromLongLong(view->shape[i]))) PyTuple_SetItem(shape, i, length);
    PyObject *pair = length ? PyTuple_Pack(2, shape, dtype) : NULL;
    Py_XDECREF(shape);
    if (!pair) PyErr_Clear();
    if (!pair || !is_flat) return pair;
    Py_XDECREF(last);
    last = shared(pair);
    its_length = view->shape[0];
    return pair;
}

/* torch shows its integers of 1 to 7 bits, which have no arithmetic, as ones of 8. */
static int is_of_its_dtype(PyObject *tensor, const dl_tensor *view, const dtype_info *type) {
    return view->code > DL_UINT || view->bits != 8 || constant(tensor, interned.dtype) == type->dtype;
}

static const dtype_info *type_of_plain(PyObject *dtype, size_t size, int code) {
    for (int i = 0; i < OTHERS; i++) {
        if (!others[i].dtype) others[i] = (dtype_info){.dtype = shared(dtype), .size = size, .code = code};
        if (others[i].dtype == dtype) return &others[i];
    }
    return NULL;
}

static int is_on(call *c, PyObject *device) { /* where the call's other tensors are */
    if (!c->device) c->device = device;
    int is_same = PyObject_RichCompareBool(c->device, device, Py_EQ);
    if (is_same < 0) PyErr_Clear();
    return is_same > 0 ||
           mpp_refuse(c, MPP_WRONG_VALUE, "all tensors must be on one device, not %S and %S",
                      c->device == Py_None ? interned.cpu : c->device, device == Py_None ? interned.cpu : device);
}

int mpp_are_alike(const call *c, const dtype_info *one, const dtype_info *other) {
    return one == other ||
           mpp_refuse(c, MPP_WRONG_DTYPE, "all tensors must have one dtype, not %S and %S", one->dtype, other->dtype);
}

/* Plain((tensor, address, elements, bytes of each, rows, dtype, its number, (shape, dtype), device or None)) */
static int read_plain(call *c, PyObject *plain, tensor_args *s, int i, operand *o) {
    PyObject *of[9];
    for (int k = 0; k < 9; k++) of[k] = PyTuple_GetItem(plain, k);
    o->address = (uintptr_t)PyLong_AsUnsignedLongLong(of[1]);
    o->count = PyLong_AsSize_t(of[2]);
    size_t size = PyLong_AsSize_t(of[3]);
    o->rows = PyLong_AsLongLong(of[4]);
    o->type = type_of_plain(of[5], size, (int)PyLong_AsLong(of[6]));
    if (PyErr_Occurred()) PyErr_Clear(), o->type = NULL;
    if (!o->type || !is_on(c, of[8])) return 0;
    o->bytes = o->count * size;
    PyList_SetItem(s->tensors, i, shared(of[0]));
    PyTuple_SetItem(s->shapes, i, shared(of[7]));
    return 1;
}

/* `object` becomes number `i` of these. */
static int read_tensor(call *c, PyObject *object, tensor_args *s, int i, operand *o) {
    dl_tensor view;
    if ((PyObject *)Py_TYPE(object) == bridge_state.plain) return read_plain(c, object, s, i, o);
    if (!is_on(c, Py_None) || !view_of(object, &view) || view.device_type != DL_CPU) return 0;
    o->type = info_of(&view);
    if (!o->type || !o->type->dtype || !is_of_its_dtype(object, &view, o->type)) return 0;
    if (!count_elements(&view, &o->count)) return 0;
    o->bytes = o->count * o->type->size;
    o->address = (uintptr_t)view.data + view.byte_offset;
    o->rows = view.ndim ? view.shape[0] : 1;
    PyObject *shape = shape_of(&view, o->type->dtype);
    if (!shape) return 0;
    PyTuple_SetItem(s->shapes, i, shape);
    Py_INCREF(object);
    PyList_SetItem(s->tensors, i, object);
    /* Last: these run torch's code, after which the view would not be valid. */
    if (!has_memory(object, o)) return 0;
    if (o->type->is_float && says(object, interned.is_neg)) return 0;
    return !o->type->is_complex || !says(object, interned.is_conj);
}

int mpp_make_tensor_args(tensor_args *s, Py_ssize_t tensors) {
    s->tensors = PyList_New(tensors);
    s->shapes = PyTuple_New(tensors);
    return s->tensors && s->shapes ? 1 : (PyErr_Clear(), 0);
}

Py_ssize_t mpp_length_of(PyObject *list) { /* -1: it is neither a list nor a tuple */
    if ((PyObject *)Py_TYPE(list) == bridge_state.plain) return -1;
    return PyList_Check(list) ? PyList_Size(list) : PyTuple_Check(list) ? PyTuple_Size(list) : -1;
}

PyObject *mpp_item_of(PyObject *list, Py_ssize_t i) { /* borrowed */
    return PyList_Check(list) ? PyList_GetItem(list, i) : PyTuple_GetItem(list, i);
}

/* The one tensor of an argument that is a list of one, or the tensor itself. */
int mpp_read_single(call *c, PyObject *argument, tensor_args *s, operand *o) {
    Py_ssize_t length = mpp_length_of(argument);
    if (length >= 0 && length != 1)
        return mpp_refuse(c, length ? MPP_WRONG_VALUE : MPP_NO_TENSORS, "mpiplus takes one tensor per rank, not %zd",
                          length);
    return mpp_make_tensor_args(s, 1) && read_tensor(c, length < 0 ? argument : mpp_item_of(argument, 0), s, 0, o);
}

PyObject *mpp_only_list_of(const call *c, PyObject *argument) {
    Py_ssize_t length = mpp_length_of(argument);
    if (length < 1 || mpp_length_of(mpp_item_of(argument, 0)) < 0) return argument;
    if (length == 1) return mpp_item_of(argument, 0);
    mpp_refuse(c, MPP_WRONG_VALUE, "one tensor per rank goes with one list of tensors, not %zd", length);
    return NULL;
}

/* The tensors of a list, one for each rank, all of one type, which is the first's if none is given; their addresses
 * and lengths. */
int mpp_read_list(call *c, PyObject *argument, tensor_args *s, const dtype_info **type, int which) {
    int size = c->group->size;
    Py_ssize_t length = argument ? mpp_length_of(argument) : -1;
    if (length < 0) return 0;
    if (length != size)
        return mpp_refuse(c, MPP_WRONG_VALUE, "the %s%s list must have %d entries, one for each rank, not %zd",
                          c->o.root < 0 ? "" : "root's ", mpp_put_of(c, s), size, length);
    if (!mpp_make_tensor_args(s, size)) return 0;
    for (int r = 0; r < size; r++) {
        operand o;
        if (r >= mpp_length_of(argument) || !read_tensor(c, mpp_item_of(argument, r), s, r, &o)) return 0;
        if (!*type) *type = o.type;
        if (!mpp_are_alike(c, *type, o.type)) return 0;
        c->addresses[which * size + r] = o.address;
        c->lengths[which * size + r] = o.bytes;
        c->bytes += o.bytes;
    }
    return 1;
}

int mpp_make_lists(call *c, int in, int out) {
    size_t size = (size_t)c->group->size;
    c->addresses = PyMem_Calloc(2 * size, sizeof *c->addresses);
    c->lengths = PyMem_Calloc(2 * size, sizeof *c->lengths);
    if (!c->addresses || !c->lengths) return 0;
    if (in) c->o.inputs = c->addresses, c->o.input_sizes = c->lengths;
    if (out) c->o.outputs = c->addresses + size, c->o.output_sizes = c->lengths + size;
    return 1;
}

void mpp_fill_rows(call *c, int which, uintptr_t first, size_t length) {
    for (int r = 0; r < c->group->size; r++) {
        c->addresses[which * c->group->size + r] = first + (size_t)r * length;
        c->lengths[which * c->group->size + r] = length;
    }
}

/* ---- options ---- */

int mpp_read_options(call *c, PyObject *args, Py_ssize_t place) {
    if (PyTuple_Size(args) != place + 1) return 0;
    c->opts = PyTuple_GetItem(args, place);
    PyObject *is_async = PyObject_GetAttr(c->opts, interned.async_op);
    if (!is_async) return PyErr_Clear(), c->is_plain; /* a barrier's in an older torch; it is waited for all the same */
    c->sync = is_async == Py_False;
    int known = c->sync || is_async == Py_True;
    Py_DECREF(is_async);
    return known;
}

int mpp_as_long(PyObject *number, int64_t *value) {
    *value = number ? PyLong_AsLongLong(number) : -1;
    return *value == -1 && PyErr_Occurred() ? (PyErr_Clear(), 0) : 1;
}

int mpp_as_int(PyObject *number, int *value) {
    int64_t wide;
    if (!mpp_as_long(number, &wide)) return 0;
    *value = (int)wide;
    return *value == wide;
}

int mpp_read_rank(const call *c, PyObject *given, const char *what, int *rank) {
    if (mpp_as_int(given, rank) && *rank >= 0 && *rank < c->group->size) return 1;
    return given && mpp_refuse(c, MPP_WRONG_VALUE, "%s %S is not in the group, whose ranks are 0 to %d", what, given,
                               c->group->size - 1);
}

int mpp_read_root(call *c) {
    PyObject *root = PyObject_GetAttr(c->opts, interned.root_rank);
    int known = mpp_read_rank(c, root, "root rank", &c->o.root);
    Py_XDECREF(root);
    return known;
}

static int read_factor(call *c, PyObject *op) {
    PyObject *factor = PyObject_CallFunctionObjArgs(bridge_state.premul_factor, op, NULL);
    c->how.has_premul = 1;
    c->how.premul = factor ? PyFloat_AsDouble(factor) : 0;
    Py_XDECREF(factor);
    return !PyErr_Occurred();
}

/* Raises; Python has torch's names of operations. */
static void refuse_reduction(const call *c, const dtype_info *type, PyObject *op) {
    PyObject *none = PyObject_CallFunctionObjArgs(bridge_state.reduction, c->self, type->dtype, op, c->name, NULL);
    Py_XDECREF(none);
}

int mpp_read_reduction(call *c, const dtype_info *type) {
    PyObject *op = PyObject_GetAttr(c->opts, interned.reduce_op);
    Py_hash_t number = op ? PyObject_Hash(op) : -1; /* torch's number of it; asking for it by name takes long */
    int known = number >= 0 && number < OPERATIONS && operations[number].is_there && type->code >= 0;
    if (known) {
        const reduction_kind *kind = &operations[number];
        c->how = (mpp_reduction){.dtype = type->code, .op = kind->code, .premul = 1};
        c->how.divisor = kind->is_average ? c->group->size : 1;
        known = !(type->code == MPP_BOOL && (kind->is_average || kind->has_premul)) &&
                (!kind->has_premul || read_factor(c, op)) && mpp_engine->reduction_supported(type->code, c->how.op);
    }
    if (!known && !c->is_plain) PyErr_Clear();
    if (!known && op && !PyErr_Occurred() && c->is_plain) refuse_reduction(c, type, op);
    Py_XDECREF(op);
    return known;
}

void mpp_forget(call *c) {
    Py_XDECREF((PyObject *)c->group);
    Py_XDECREF(c->out.tensors);
    Py_XDECREF(c->out.shapes);
    Py_XDECREF(c->in.tensors);
    Py_XDECREF(c->in.shapes);
    PyMem_Free(c->addresses);
    PyMem_Free(c->lengths);
}

/* ---- what Python tells once ---- */

/* `numbers`: torch's number of an operation: (ours, whether it is the average, and the sum with factors). */
static int know_operations(PyObject *numbers) {
    PyObject *number, *info;
    for (Py_ssize_t at = 0; PyDict_Next(numbers, &at, &number, &info);) {
        long index = PyLong_AsLong(number);
        if (index < 0 || index >= OPERATIONS)
            return PyErr_Occurred() ? 0 : (PyErr_Format(PyExc_ValueError, "operation number %ld", index), 0);
        reduction_kind *kind = &operations[index];
        if (!PyArg_ParseTuple(info, "ipp", &kind->code, &kind->is_average, &kind->has_premul)) return 0;
        kind->is_there = 1;
    }
    return 1;
}

/* `samples`: a tensor of each dtype: (the dtype, its size, enum mpp_dtype or -1, whether float, whether complex). */
static int know_dtypes(PyObject *samples) {
    PyObject *sample, *info;
    for (Py_ssize_t at = 0; PyDict_Next(samples, &at, &sample, &info);) {
        dl_tensor view;
        dtype_info *known = view_of(sample, &view) ? info_of(&view) : NULL, read = {0};
        Py_ssize_t size;
        if (!PyArg_ParseTuple(info, "Onipp", &read.dtype, &size, &read.code, &read.is_float, &read.is_complex))
            return 0;
        if (!known || known->dtype) continue; /* such tensors go through Python */
        Py_INCREF(read.dtype);
        read.size = (size_t)size;
        *known = read;
    }
    return 1;
}

int mpp_know_tensors(PyObject *capsule, PyObject *types, PyObject *samples, PyObject *numbers) {
    tensor_types = types;
    if (!know_operations(numbers) || capsule == Py_None) return capsule == Py_None && !PyErr_Occurred();
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange) return 0;
    if (exchange->major != DL_MAJOR || !exchange->view)
        return PyErr_Format(PyExc_RuntimeError, "DLPack %u shows no tensors to C", exchange->major), 0;
    return know_dtypes(samples);
}
