/* The methods of c10d that C can carry out from the call to the Work: how their arguments are read, and what is
 * started.
 *
 * Python's table of operations (operations.py) names a function and roles of operands for each; group/operands.py makes
 * plain tensors of all others, and what is wrong with a call is said of these (mpp_refuse). */
#include <string.h>

#include "python/call.h"

/* ---- what is started ---- */

#define MPP_OPERATION(name, parameters, ...)                                                                           \
    static uintptr_t start_##name(const call *c, int64_t ns) { return mpp_engine->name(c->of, ##__VA_ARGS__, ns); }
#include "ops.def"

/* ---- the operands: args are self, then c10d's. As mpp_read_call says ---- */

static int has_length(const call *c, const char *what, size_t bytes, size_t expected) {
    size_t size = c->a.type->size;
    return bytes == expected ||
           mpp_refuse(c, MPP_WRONG_VALUE, "%s must have %zu elements, not %zu", what, expected / size, bytes / size);
}

static int sends_itself_what_it_expects(const call *c) {
    int me = c->group->rank;
    size_t sent = c->lengths[me], received = c->lengths[c->group->size + me], size = c->a.type->size;
    return sent == received || mpp_refuse(c, MPP_WRONG_VALUE, "this rank sends itself %zu elements but expects %zu",
                                          sent / size, received / size);
}

static int read_nothing(call *c, PyObject *args) { return (void)args, mpp_make_tensor_args(&c->out, 0); }

static int read_error(call *c, PyObject *args) {
    return mpp_as_int(PyTuple_GetItem(args, 1), &c->tag) && read_nothing(c, args);
}

/* Of one tensor only number 0 can be meant. */
static int names_only_tensor(const call *c) {
    int number;
    PyObject *given = PyObject_GetAttr(c->opts, interned.root_tensor);
    if (!given) return PyErr_Clear(), 0;
    int is_only = (mpp_as_int(given, &number) && number == 0) ||
                  mpp_refuse(c, MPP_WRONG_VALUE, "invalid root tensor: %S; this rank has 1", given);
    Py_DECREF(given);
    return is_only;
}

static int read_one(call *c, PyObject *args) {
    if (!mpp_read_single(c, PyTuple_GetItem(args, 1), &c->out, &c->a)) return 0;
    c->bytes = c->a.bytes;
    return c->root < 0 || c->results || names_only_tensor(c);
}

/* Output `b`, input `a`. */
static int read_pair(call *c, PyObject *args) {
    return mpp_read_single(c, PyTuple_GetItem(args, 1), &c->out, &c->b) &&
           mpp_read_single(c, PyTuple_GetItem(args, 2), &c->in, &c->a) && mpp_are_alike(c, c->a.type, c->b.type);
}

static int read_whole_and_own(call *c, PyObject *args) {
    if (!read_pair(c, args)) return 0;
    c->bytes = c->b.bytes;
    return has_length(c, "the output", c->b.bytes, c->a.bytes * (size_t)c->group->size) &&
           mpp_is_apart_or_block(&c->b, &c->a, c->group->rank);
}

static int is_apart_from_list(const call *c, const operand *o, int is_written) {
    const mpp_tensors one = {&o->address, &o->bytes, 1, 0};
    const mpp_tensors list = {c->addresses, c->lengths, c->group->size, c->group->rank};
    return is_written ? mpp_lists_are_apart(&list, &one) : mpp_lists_are_apart(&one, &list);
}

static int read_list_and_own(call *c, PyObject *args) {
    if (!mpp_read_single(c, PyTuple_GetItem(args, 2), &c->in, &c->a) || !mpp_make_lists(c)) return 0;
    return mpp_read_list(c, mpp_only_list_of(c, PyTuple_GetItem(args, 1)), &c->out, &c->a.type, 0) &&
           has_length(c, "this rank's output", c->lengths[c->group->rank], c->a.bytes) &&
           is_apart_from_list(c, &c->a, 0);
}

static int read_own_and_whole(call *c, PyObject *args) {
    if (!read_pair(c, args) || !has_length(c, "the input", c->a.bytes, c->b.bytes * (size_t)c->group->size)) return 0;
    if (!mpp_make_lists(c)) return 0;
    mpp_fill_rows(c, 0, c->a.address, c->b.bytes);
    for (int r = 0; r < c->group->size; r++) c->lengths[r] = c->b.count;
    c->flat = 1;
    c->bytes = c->a.bytes;
    return mpp_is_apart_or_block(&c->a, &c->b, c->group->rank);
}

static int read_own_and_list(call *c, PyObject *args) {
    if (!mpp_read_single(c, PyTuple_GetItem(args, 1), &c->out, &c->b) || !mpp_make_lists(c)) return 0;
    c->a.type = c->b.type;
    if (!mpp_read_list(c, mpp_only_list_of(c, PyTuple_GetItem(args, 2)), &c->in, &c->a.type, 0)) return 0;
    if (!has_length(c, "the output", c->b.bytes, c->lengths[c->group->rank])) return 0;
    if (!is_apart_from_list(c, &c->b, 1)) return 0;
    for (int r = 0; r < c->group->size; r++) c->lengths[r] /= c->b.type->size;
    return 1;
}

/* The list that only the root gives, of tensors like this rank's own. */
static int read_list_of_root(call *c, PyObject *argument, tensor_args *s, const operand *own, int which) {
    int size = c->group->size;
    const dtype_info *type = own->type;
    PyObject *list = mpp_only_list_of(c, argument);
    if (list && c->root != c->group->rank)
        return mpp_length_of(list) == 0 ||
               mpp_refuse(c, MPP_WRONG_VALUE, "only the root may pass an %s list", mpp_put_of(c, s));
    if (!mpp_read_list(c, list, s, &type, which)) return 0;
    const char *what = s == &c->out ? "each output" : "each input";
    for (int r = 0; r < size; r++)
        if (!has_length(c, what, c->lengths[which * size + r], own->bytes)) return 0;
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

static int send_to_root(call *c) {
    only_for_root(c, 0);
    if (!c->out.tensors) /* nothing comes here: the Work's tensor is the one sent */
        c->out = (tensor_args){shared(c->in.tensors), shared(c->in.shapes)};
    return is_exchange_apart(c);
}

static int read_roots_list_and_own(call *c, PyObject *args) {
    if (!mpp_read_single(c, PyTuple_GetItem(args, 2), &c->in, &c->a) || !mpp_make_lists(c)) return 0;
    return read_list_of_root(c, PyTuple_GetItem(args, 1), &c->out, &c->a, 1) && send_to_root(c);
}

/* The others' output is not looked at. */
static int read_roots_whole_and_own(call *c, PyObject *args) {
    int size = c->group->size;
    if (!mpp_read_single(c, PyTuple_GetItem(args, 2), &c->in, &c->a) || !mpp_make_lists(c)) return 0;
    if (c->root == c->group->rank) {
        if (!mpp_read_single(c, PyTuple_GetItem(args, 1), &c->out, &c->b)) return 0;
        if (!mpp_are_alike(c, c->a.type, c->b.type)) return 0;
        if (!has_length(c, "the root's output", c->b.bytes, c->a.bytes * (size_t)size)) return 0;
        mpp_fill_rows(c, 1, c->b.address, c->a.bytes);
    }
    c->bytes = c->a.bytes;
    return send_to_root(c);
}

static int read_own_and_roots_list(call *c, PyObject *args) {
    if (!mpp_read_single(c, PyTuple_GetItem(args, 1), &c->out, &c->a) || !mpp_make_lists(c)) return 0;
    if (!read_list_of_root(c, PyTuple_GetItem(args, 2), &c->in, &c->a, 0)) return 0;
    only_for_root(c, 1);
    return is_exchange_apart(c) && (c->in.tensors || mpp_make_tensor_args(&c->in, 0));
}

/* Rows along dimension 0 for each rank; equal parts, if no sizes are given. */
static int read_splits(call *c, PyObject *sizes, const operand *o, int which) {
    const char *what = which ? "output" : "input";
    int ranks = c->group->size;
    size_t row = o->rows ? o->bytes / (size_t)o->rows : 0, at = 0;
    Py_ssize_t given = sizes == Py_None ? 0 : mpp_length_of(sizes);
    if (given == 0) {
        if (o->rows % ranks)
            return mpp_refuse(c, MPP_WRONG_VALUE,
                              "dimension 0 of the %s (%lld) cannot be divided by %d ranks; pass split sizes", what,
                              (long long)o->rows, ranks);
        mpp_fill_rows(c, which, o->address, (size_t)(o->rows / ranks) * row);
        return 1;
    }
    if (given != ranks)
        return mpp_refuse(c, MPP_WRONG_VALUE, "%s split sizes must have %d entries, one for each rank, not %zd", what,
                          ranks, given);
    int64_t left = o->rows;
    for (int r = 0; r < ranks; r++) {
        int64_t rows;
        if (!mpp_as_long(mpp_item_of(sizes, r), &rows) || rows < 0 || rows > left) {
            left = -1;
            break;
        }
        left -= rows;
        c->addresses[which * ranks + r] = o->address + at;
        c->lengths[which * ranks + r] = (size_t)rows * row;
        at += (size_t)rows * row;
    }
    return left == 0 || mpp_refuse(c, MPP_WRONG_VALUE, "%s split sizes %R do not add up to its dimension 0 (%lld)",
                                   what, sizes, (long long)o->rows);
}

static int read_rows(call *c, PyObject *args) {
    if (!read_pair(c, args) || !mpp_make_lists(c)) return 0;
    if (!read_splits(c, PyTuple_GetItem(args, 4), &c->a, 0)) return 0;
    if (!read_splits(c, PyTuple_GetItem(args, 3), &c->b, 1)) return 0;
    c->bytes = c->a.bytes + c->b.bytes;
    return sends_itself_what_it_expects(c) && mpp_operands_are_apart(&c->a, &c->b);
}

static int read_lists(call *c, PyObject *args) {
    return mpp_make_lists(c) && mpp_read_list(c, PyTuple_GetItem(args, 2), &c->in, &c->a.type, 0) &&
           mpp_read_list(c, PyTuple_GetItem(args, 1), &c->out, &c->a.type, 1) && sends_itself_what_it_expects(c) &&
           is_exchange_apart(c);
}

static int read_tagged(call *c, PyObject *args, int has_peer) {
    Py_ssize_t given = PyTuple_Size(args), tag = has_peer ? 3 : 2;
    c->peer = ANY_PEER;
    if (given != tag && given != tag + 1) return 0;
    if (has_peer && !mpp_read_rank(c, PyTuple_GetItem(args, 2), "rank", &c->peer)) return 0;
    if (given > tag &&
        (!mpp_as_int(PyTuple_GetItem(args, tag), &c->tag) || c->tag < 0 || c->tag > c->group->largest_tag))
        return mpp_refuse(c, MPP_WRONG_VALUE, "tag %S is out of range; this MPI carries tags 0 to %d",
                          PyTuple_GetItem(args, tag), c->group->largest_tag);
    if (!mpp_read_single(c, PyTuple_GetItem(args, 1), &c->out, &c->a)) return 0;
    c->bytes = c->a.bytes;
    return 1;
}

static int read_message(call *c, PyObject *args) { return read_tagged(c, args, 1); }

static int read_from_any(call *c, PyObject *args) { return read_tagged(c, args, 0); }

/* What group/windows.py has made: a tensor or None, the other rank, where in its tensor, which kind of signal, the
 * window, whether the call is asynchronous, and options with its timeout or None. */
static int read_of_window(call *c, PyObject *args) {
    PyObject *self, *tensor;
    unsigned long long window;
    Py_ssize_t offset;
    int is_async;
    if (!PyArg_ParseTuple(args, "OOiniKpO", &self, &tensor, &c->peer, &offset, &c->tag, &window, &is_async, &c->opts))
        return 0;
    c->of = window;
    c->offset = (size_t)offset;
    c->sync = !is_async;
    if (tensor == Py_None) return mpp_make_tensor_args(&c->out, 0);
    if (!mpp_read_single(c, tensor, &c->out, &c->a)) return 0;
    c->bytes = c->a.bytes;
    return 1;
}

/* ---- the tables of both ---- */

starter *mpp_find_starter(const char *name) {
    static const struct {
        const char *name;
        starter *start;
    } starters[] = {
#define MPP_OPERATION(name, ...) {#name, start_##name},
#include "ops.def"
    };
    for (size_t i = 0; i < sizeof starters / sizeof *starters; i++)
        if (!strcmp(starters[i].name, name)) return starters[i].start;
    return NULL;
}

int mpp_find_method(mpp_method *m, const char *start, const char *roles) {
    static const struct {
        const char *roles; /* of tensors */
        int count;         /* of arguments before the options */
        reader *read;
    } readers[] = {{"", 0, read_nothing},
                   {"inout", 1, read_one},
                   {"out*+in", 2, read_whole_and_own},
                   {"out[]+in", 2, read_list_and_own},
                   {"out+in*", 2, read_own_and_whole},
                   {"out+in[]", 2, read_own_and_list},
                   {"out[root]+in", 2, read_roots_list_and_own},
                   {"out*[root]+in", 2, read_roots_whole_and_own},
                   {"out+in[root]", 2, read_own_and_roots_list},
                   {"out/+in/", 4, read_rows},
                   {"out[]+in[]", 2, read_lists},
                   {"in@peer", NO_OPTIONS, read_message},
                   {"out@peer", NO_OPTIONS, read_message},
                   {"out@any", NO_OPTIONS, read_from_any},
                   {"in@window", NO_OPTIONS, read_of_window},
                   {"error", NO_OPTIONS, read_error}};
    size_t tensors = strcspn(roles, " ");
    m->has_root = strstr(roles + tensors, " root") != NULL;
    m->reduces = strstr(roles + tensors, " op") != NULL;
    m->start = mpp_find_starter(start);
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++) {
        if (strlen(readers[i].roles) != tensors || strncmp(readers[i].roles, roles, tensors)) continue;
        m->read = readers[i].read;
        m->operands = readers[i].count;
    }
    return m->start && m->read;
}

int mpp_read_call(call *c, const mpp_method *m, PyObject *args) {
    c->start = m->start;
    c->of = c->group->handle;
    return (m->operands == NO_OPTIONS || mpp_read_options(c, args, m->operands + 1)) &&
           (!m->has_root || mpp_read_root(c)) && m->read(c, args) && (!m->reduces || mpp_read_reduction(c, c->a.type));
}
