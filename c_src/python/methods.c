/* The methods of c10d that C can carry out from the call to the Work: how their arguments are read, and what is
 * started.
 *
 * A list has a method for each family of operations; process_group.py has the same in Python, for all other tensors. */
#include <string.h>

#include "python/bridge.h"

/* ---- what is started ---- */

static uintptr_t start_barrier(const call *c, int64_t ns) { return mpp_engine->barrier(c->group->handle, ns); }

static uintptr_t start_broadcast(const call *c, int64_t ns) {
    return mpp_engine->broadcast(c->group->handle, c->a.address, c->a.bytes, c->root, 0, ns);
}

static uintptr_t start_allreduce(const call *c, int64_t ns) {
    return mpp_engine->allreduce(c->group->handle, c->a.address, c->a.address, c->a.count, &c->how, 0, ns);
}

static uintptr_t start_reduce(const call *c, int64_t ns) {
    return mpp_engine->reduce_to(c->group->handle, c->a.address, c->a.address, c->a.count, &c->how, c->root, 0, ns);
}

static uintptr_t start_allgather(const call *c, int64_t ns) {
    return mpp_engine->allgather(c->group->handle, c->a.address, c->b.address, c->a.bytes, 0, ns);
}

static uintptr_t start_allgather_list(const call *c, int64_t ns) {
    return mpp_engine->allgather_list(c->group->handle, c->a.address, c->addresses, c->lengths, 0, ns);
}

static uintptr_t start_reduce_scatter(const call *c, int64_t ns) {
    const mpp_reduction *how = &c->how;
    return mpp_engine->reduce_scatter(c->group->handle, c->addresses, c->b.address, c->lengths, c->flat, how, 0, ns);
}

static uintptr_t start_exchange(const call *c, int64_t ns) {
    int size = c->group->size;
    return mpp_engine->exchange(c->group->handle, c->addresses, c->lengths, c->addresses + size, c->lengths + size, -1,
                                0, ns);
}

static uintptr_t start_send(const call *c, int64_t ns) {
    return mpp_engine->send(c->group->handle, c->a.address, c->a.bytes, c->peer, c->tag, 0, ns);
}

static uintptr_t start_recv(const call *c, int64_t ns) {
    /* from anyone: even if it is complete it must be asked where it came from */
    return mpp_engine->recv(c->group->handle, c->a.address, c->a.bytes, c->peer, c->tag, 0, c->peer < 0 ? -1 : ns);
}

/* ---- the methods: args are self, then c10d's ---- */

static int read_barrier(call *c, PyObject *args) {
    c->start = start_barrier;
    return mpp_read_options(c, args, 1) && mpp_make_tensor_args(&c->out, 0);
}

static int read_one(call *c, PyObject *args) {
    if (!mpp_read_options(c, args, 2) || !mpp_read_single(PyTuple_GetItem(args, 1), &c->out, &c->a)) return 0;
    c->bytes = c->a.bytes;
    return 1;
}

/* Of one tensor only number 0 can be meant; Python knows the words for others. */
static int names_only_tensor(const call *c) {
    static PyObject *root_tensor;
    int number;
    if (!root_tensor && !(root_tensor = PyUnicode_InternFromString("rootTensor"))) return PyErr_Clear(), 0;
    PyObject *given = PyObject_GetAttr(c->opts, root_tensor);
    int is_only = mpp_as_int(given, &number) && number == 0;
    Py_XDECREF(given);
    return is_only;
}

static int read_broadcast(call *c, PyObject *args) {
    c->start = start_broadcast;
    return read_one(c, args) && mpp_read_root(c) && names_only_tensor(c);
}

static int read_allreduce(call *c, PyObject *args) {
    c->start = start_allreduce;
    return read_one(c, args) && mpp_read_reduction(c, c->a.type);
}

static int read_reduce(call *c, PyObject *args) {
    c->start = start_reduce;
    return read_one(c, args) && mpp_read_root(c) && names_only_tensor(c) && mpp_read_reduction(c, c->a.type);
}

/* Output `b`, input `a`. */
static int read_pair(call *c, PyObject *args, Py_ssize_t options) {
    return mpp_read_options(c, args, options) && mpp_read_single(PyTuple_GetItem(args, 1), &c->out, &c->b) &&
           mpp_read_single(PyTuple_GetItem(args, 2), &c->in, &c->a) && c->a.type == c->b.type;
}

static int read_allgather_base(call *c, PyObject *args) {
    c->start = start_allgather;
    if (!read_pair(c, args, 3)) return 0;
    c->bytes = c->b.bytes;
    return c->b.count == c->a.count * (size_t)c->group->size && mpp_is_apart_or_block(&c->b, &c->a, c->group->rank);
}

static int is_apart_from_list(const call *c, const operand *o, int is_written) {
    const mpp_tensors one = {&o->address, &o->bytes, 1, 0};
    const mpp_tensors list = {c->addresses, c->lengths, c->group->size, c->group->rank};
    return is_written ? mpp_lists_are_apart(&list, &one) : mpp_lists_are_apart(&one, &list);
}

static int read_allgather(call *c, PyObject *args) {
    c->start = start_allgather_list;
    if (!mpp_read_options(c, args, 3) || !mpp_read_single(PyTuple_GetItem(args, 2), &c->in, &c->a) ||
        !mpp_make_lists(c))
        return 0;
    return mpp_read_list(c, mpp_only_list_of(PyTuple_GetItem(args, 1)), &c->out, &c->a.type, 0) &&
           c->lengths[c->group->rank] == c->a.bytes && is_apart_from_list(c, &c->a, 0);
}

static int read_reduce_scatter_base(call *c, PyObject *args) {
    c->start = start_reduce_scatter;
    if (!read_pair(c, args, 3) || c->a.count != c->b.count * (size_t)c->group->size || !mpp_make_lists(c)) return 0;
    mpp_fill_rows(c, 0, c->a.address, c->b.bytes);
    for (int r = 0; r < c->group->size; r++) c->lengths[r] = c->b.count;
    c->flat = 1;
    c->bytes = c->a.bytes;
    return mpp_is_apart_or_block(&c->a, &c->b, c->group->rank) && mpp_read_reduction(c, c->b.type);
}

static int read_reduce_scatter(call *c, PyObject *args) {
    c->start = start_reduce_scatter;
    if (!mpp_read_options(c, args, 3) || !mpp_read_single(PyTuple_GetItem(args, 1), &c->out, &c->b) ||
        !mpp_make_lists(c))
        return 0;
    if (!mpp_read_list(c, mpp_only_list_of(PyTuple_GetItem(args, 2)), &c->in, &c->b.type, 0)) return 0;
    if (!is_apart_from_list(c, &c->b, 1)) return 0;
    for (int r = 0; r < c->group->size; r++) c->lengths[r] /= c->b.type->size;
    return c->lengths[c->group->rank] == c->b.count && mpp_read_reduction(c, c->b.type);
}

/* The list that only the root gives, of tensors like this rank's own. */
static int read_roots_list(call *c, PyObject *argument, tensor_args *s, const operand *own, int which) {
    int size = c->group->size;
    const dtype_info *type = own->type;
    if (c->root != c->group->rank)
        return mpp_length_of(argument) == 0 ||
               (mpp_length_of(argument) == 1 && mpp_length_of(mpp_item_of(argument, 0)) == 0);
    if (!mpp_read_list(c, mpp_only_list_of(argument), s, &type, which)) return 0;
    for (int r = 0; r < size; r++)
        if (c->lengths[which * size + r] != own->bytes) return 0;
    return 1;
}

static int is_exchange_apart(const call *c) {
    int size = c->group->size, me = c->group->rank;
    const mpp_tensors send = {c->addresses, c->lengths, size, me},
                      receive = {c->addresses + size, c->lengths + size, size, me};
    return mpp_lists_are_apart(&send, &receive);
}

static void only_for_root(call *c, int which) {
    c->addresses[which * c->group->size + c->root] = c->a.address;
    c->lengths[which * c->group->size + c->root] = c->a.bytes;
}

static int read_gather(call *c, PyObject *args) {
    c->start = start_exchange;
    if (!mpp_read_options(c, args, 3) || !mpp_read_root(c) || !mpp_read_single(PyTuple_GetItem(args, 2), &c->in, &c->a))
        return 0;
    if (!mpp_make_lists(c) || !read_roots_list(c, PyTuple_GetItem(args, 1), &c->out, &c->a, 1)) return 0;
    only_for_root(c, 0);
    if (!c->out.tensors) { /* nothing comes here: the Work's tensor is the one sent */
        Py_INCREF(c->in.tensors);
        Py_INCREF(c->in.shapes);
        c->out = c->in;
    }
    return is_exchange_apart(c);
}

static int read_scatter(call *c, PyObject *args) {
    c->start = start_exchange;
    if (!mpp_read_options(c, args, 3) || !mpp_read_root(c) ||
        !mpp_read_single(PyTuple_GetItem(args, 1), &c->out, &c->a))
        return 0;
    if (!mpp_make_lists(c) || !read_roots_list(c, PyTuple_GetItem(args, 2), &c->in, &c->a, 0)) return 0;
    only_for_root(c, 1);
    return is_exchange_apart(c) && (c->in.tensors || mpp_make_tensor_args(&c->in, 0));
}

static int read_splits(call *c, PyObject *sizes, const operand *o, int which) {
    int ranks = c->group->size;
    size_t row = o->rows ? o->bytes / (size_t)o->rows : 0, at = 0;
    Py_ssize_t given = sizes == Py_None ? 0 : mpp_length_of(sizes);
    if (given == 0) {
        if (o->rows % ranks) return 0;
        mpp_fill_rows(c, which, o->address, (size_t)(o->rows / ranks) * row);
        return 1;
    }
    if (given != ranks) return 0;
    int64_t total = 0;
    for (int r = 0; r < ranks; r++) {
        int rows;
        if (!mpp_as_int(mpp_item_of(sizes, r), &rows) || rows < 0) return 0;
        total += rows;
        c->addresses[which * ranks + r] = o->address + at;
        c->lengths[which * ranks + r] = (size_t)rows * row;
        at += (size_t)rows * row;
    }
    return total == o->rows;
}

static int read_alltoall_base(call *c, PyObject *args) {
    int size = c->group->size, me = c->group->rank;
    c->start = start_exchange;
    if (!read_pair(c, args, 5) || !mpp_make_lists(c)) return 0;
    if (!read_splits(c, PyTuple_GetItem(args, 4), &c->a, 0)) return 0;
    if (!read_splits(c, PyTuple_GetItem(args, 3), &c->b, 1)) return 0;
    c->bytes = c->a.bytes + c->b.bytes;
    return c->lengths[me] == c->lengths[size + me] && mpp_operands_are_apart(&c->a, &c->b);
}

static int read_alltoall(call *c, PyObject *args) {
    PyObject *inputs = PyTuple_Size(args) == 4 ? PyTuple_GetItem(args, 2) : NULL;
    int size = c->group->size, me = c->group->rank;
    c->start = start_exchange;
    if (!mpp_read_options(c, args, 3) || mpp_length_of(inputs) != size || !mpp_make_lists(c)) return 0;
    return mpp_read_list(c, inputs, &c->in, &c->a.type, 0) &&
           mpp_read_list(c, PyTuple_GetItem(args, 1), &c->out, &c->a.type, 1) &&
           c->lengths[me] == c->lengths[size + me] && is_exchange_apart(c);
}

static int read_message(call *c, PyObject *args, int has_peer) {
    Py_ssize_t given = PyTuple_Size(args), tag = has_peer ? 3 : 2;
    c->peer = -1;
    if (given != tag && given != tag + 1) return 0;
    if (has_peer && (!mpp_as_int(PyTuple_GetItem(args, 2), &c->peer) || c->peer < 0 || c->peer >= c->group->size))
        return 0;
    if (given > tag &&
        (!mpp_as_int(PyTuple_GetItem(args, tag), &c->tag) || c->tag < 0 || c->tag > c->group->largest_tag))
        return 0;
    if (!mpp_read_single(PyTuple_GetItem(args, 1), &c->out, &c->a)) return 0;
    c->bytes = c->a.bytes;
    return 1;
}

static int read_send(call *c, PyObject *args) {
    c->start = start_send;
    return read_message(c, args, 1);
}

static int read_recv(call *c, PyObject *args) {
    c->start = start_recv;
    return read_message(c, args, 1);
}

static int read_recv_anysource(call *c, PyObject *args) {
    c->start = start_recv;
    return read_message(c, args, 0);
}

reader *mpp_reader_of(const char *name) {
    static const struct {
        const char *name;
        reader *read;
    } all[] = {{"barrier", read_barrier},
               {"broadcast", read_broadcast},
               {"allreduce", read_allreduce},
               {"reduce", read_reduce},
               {"_allgather_base", read_allgather_base},
               {"allgather", read_allgather},
               {"_reduce_scatter_base", read_reduce_scatter_base},
               {"reduce_scatter", read_reduce_scatter},
               {"gather", read_gather},
               {"scatter", read_scatter},
               {"alltoall_base", read_alltoall_base},
               {"alltoall", read_alltoall},
               {"send", read_send},
               {"recv", read_recv},
               {"recv_anysource", read_recv_anysource}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i].name, name)) return all[i].read;
    return NULL;
}
