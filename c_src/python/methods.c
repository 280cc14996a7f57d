/* The methods of c10d that C can carry out from the call to the Work: how their arguments are read, and what is
 * started.
 *
 * Python's table of operations (operations.py) names a function and roles of operands for each; group/operands.py makes
 * plain tensors of all others, and what is wrong with a call is said of these (mpp_refuse). */
#include <string.h>

#include "python/call.h"

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
    return mpp_as_int(PyTuple_GetItem(args, 1), &c->o.error) && read_nothing(c, args);
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
    return c->o.root < 0 || c->results || names_only_tensor(c);
}

static int is_exchange_apart(const call *c) {
    int size = c->group->size, me = c->group->rank;
    const mpp_tensors send = {c->addresses, c->lengths, size, me},
                      receive = {c->addresses + size, c->lengths + size, size, me};
    return mpp_lists_are_apart(&send, &receive);
}

/* The blocks of all ranks, or the root's, in one tensor `b`: each is as long as `a`. What others have there is not
 * looked at. */
static int read_whole(call *c, PyObject *argument, int which) {
    const char *what = c->o.root >= 0 ? "the root's output" : which ? "the output" : "the input";
    c->bytes = c->a.bytes;
    if (c->o.root >= 0 && c->o.root != c->group->rank) return 1;
    if (!mpp_read_single(c, argument, which ? &c->out : &c->in, &c->b)) return 0;
    if (!(which ? mpp_are_alike(c, c->a.type, c->b.type) : mpp_are_alike(c, c->b.type, c->a.type))) return 0;
    if (!has_length(c, what, c->b.bytes, c->a.bytes * (size_t)c->group->size)) return 0;
    mpp_fill_rows(c, which, c->b.address, c->a.bytes);
    c->o.flat = 1;
    if (c->o.root < 0) c->bytes = c->b.bytes;
    return 1;
}

/* The same in a list. The root's are all as long as `a`, of others this rank's is. */
static int read_list(call *c, PyObject *argument, int which) {
    int size = c->group->size, me = c->group->rank;
    const dtype_info *type = c->a.type;
    tensor_args *s = which ? &c->out : &c->in;
    PyObject *list = mpp_only_list_of(c, argument);
    if (list && c->o.root >= 0 && c->o.root != me)
        return mpp_length_of(list) == 0 ||
               mpp_refuse(c, MPP_WRONG_VALUE, "only the root may pass an %s list", mpp_put_of(c, s));
    if (!mpp_read_list(c, list, s, &type, which)) return 0;
    const size_t *lengths = c->lengths + which * size;
    if (c->o.root < 0)
        return which ? has_length(c, "this rank's output", lengths[me], c->a.bytes)
                     : has_length(c, "the output", c->a.bytes, lengths[me]);
    for (int r = 0; r < size; r++)
        if (!has_length(c, which ? "each output" : "each input", lengths[r], c->a.bytes)) return 0;
    return 1;
}

/* An exchange, in which this rank's own tensor goes to the root, or comes from there. */
static int read_with_root(call *c, int which) {
    int place = !which * c->group->size + c->o.root;
    c->addresses[place] = c->a.address;
    c->lengths[place] = c->a.bytes;
    if (which && !c->out.tensors) /* nothing comes here: the Work's tensor is the one sent */
        c->out = (tensor_args){shared(c->in.tensors), shared(c->in.shapes)};
    return is_exchange_apart(c) && (c->in.tensors || mpp_make_tensor_args(&c->in, 0));
}

/* This rank's tensor, `a`, and blocks of all. */
static int read_own_and_blocks(call *c, PyObject *args) {
    const mpp_method *m = c->method;
    int which = m->writes_blocks, size = c->group->size, has_root = c->o.root >= 0;
    PyObject *own = PyTuple_GetItem(args, 1 + which), *blocks = PyTuple_GetItem(args, 2 - which);
    if (!mpp_read_single(c, own, which ? &c->in : &c->out, &c->a)) return 0;
    if (!mpp_make_lists(c, !which || has_root, which || has_root)) return 0;
    if (!(m->in_one ? read_whole(c, blocks, which) : read_list(c, blocks, which))) return 0;
    if (has_root) return read_with_root(c, which);
    const mpp_tensors one = {&c->a.address, &c->a.bytes, 1, 0};
    const mpp_tensors all = {c->addresses + which * size, c->lengths + which * size, size, c->group->rank};
    if (!(which ? mpp_lists_are_apart(&one, &all) : mpp_lists_are_apart(&all, &one))) return 0;
    for (int r = 0; m->reduces && r < size; r++) c->lengths[r] /= c->a.type->size;
    return 1;
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
    if (!mpp_read_single(c, PyTuple_GetItem(args, 1), &c->out, &c->b)) return 0;
    if (!mpp_read_single(c, PyTuple_GetItem(args, 2), &c->in, &c->a)) return 0;
    if (!mpp_are_alike(c, c->a.type, c->b.type) || !mpp_make_lists(c, 1, 1)) return 0;
    if (!read_splits(c, PyTuple_GetItem(args, 4), &c->a, 0)) return 0;
    if (!read_splits(c, PyTuple_GetItem(args, 3), &c->b, 1)) return 0;
    c->bytes = c->a.bytes + c->b.bytes;
    return sends_itself_what_it_expects(c) && mpp_operands_are_apart(&c->a, &c->b);
}

static int read_lists(call *c, PyObject *args) {
    return mpp_make_lists(c, 1, 1) && mpp_read_list(c, PyTuple_GetItem(args, 2), &c->in, &c->a.type, 0) &&
           mpp_read_list(c, PyTuple_GetItem(args, 1), &c->out, &c->a.type, 1) && sends_itself_what_it_expects(c) &&
           is_exchange_apart(c);
}

static int read_tagged(call *c, PyObject *args, int has_peer) {
    Py_ssize_t given = PyTuple_Size(args), tag = has_peer ? 3 : 2;
    c->o.peer = ANY_PEER;
    if (given != tag && given != tag + 1) return 0;
    if (has_peer && !mpp_read_rank(c, PyTuple_GetItem(args, 2), "rank", &c->o.peer)) return 0;
    if (given > tag &&
        (!mpp_as_int(PyTuple_GetItem(args, tag), &c->o.tag) || c->o.tag < 0 || c->o.tag > c->group->largest_tag))
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
    if (!PyArg_ParseTuple(args, "OOiniKpO", &self, &tensor, &c->o.peer, &offset, &c->o.tag, &window, &is_async,
                          &c->opts))
        return 0;
    c->o.of = window;
    c->o.offset = (size_t)offset;
    c->sync = !is_async;
    if (tensor == Py_None) return mpp_make_tensor_args(&c->out, 0);
    if (!mpp_read_single(c, tensor, &c->out, &c->a)) return 0;
    c->bytes = c->a.bytes;
    return 1;
}

/* ---- the tables of both ---- */

size_t mpp_find_starter(const char *name) {
    static const struct {
        const char *name;
        size_t place;
    } starters[] = {
#define MPP_OPERATION(name) {#name, offsetof(mpp_entries, name)},
#include "ops.def"
    };
    for (size_t i = 0; i < sizeof starters / sizeof *starters; i++)
        if (!strcmp(starters[i].name, name)) return starters[i].place;
    return 0;
}

int mpp_find_method(mpp_method *m, const char *start, const char *roles) {
    static const struct {
        const char *roles; /* of tensors */
        int count;         /* of arguments before the options */
        reader *read;
    } readers[] = {{"", 0, read_nothing},
                   {"inout", 1, read_one},
                   {"out*+in", 2, read_own_and_blocks},
                   {"out[]+in", 2, read_own_and_blocks},
                   {"out+in*", 2, read_own_and_blocks},
                   {"out+in[]", 2, read_own_and_blocks},
                   {"out[root]+in", 2, read_own_and_blocks},
                   {"out*[root]+in", 2, read_own_and_blocks},
                   {"out+in[root]", 2, read_own_and_blocks},
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
    m->writes_blocks = strncmp(roles, "out+", 4) != 0;
    m->in_one = memchr(roles, '*', tensors) != NULL;
    m->start = mpp_find_starter(start);
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++) {
        if (strlen(readers[i].roles) != tensors || strncmp(readers[i].roles, roles, tensors)) continue;
        m->read = readers[i].read;
        m->operands = readers[i].count;
    }
    return m->start && m->read;
}

int mpp_read_call(call *c, PyObject *args) {
    const mpp_method *m = c->method;
    c->start = m->start;
    c->o.of = c->group->handle;
    int is_read = (m->operands == NO_OPTIONS || mpp_read_options(c, args, m->operands + 1)) &&
                  (!m->has_root || mpp_read_root(c)) && m->read(c, args) &&
                  (!m->reduces || mpp_read_reduction(c, c->a.type));
    c->o.input = c->o.output = c->a.address;
    c->o.count = m->reduces ? c->a.count : c->a.bytes;
    c->o.how = m->reduces ? &c->how : NULL;
    if (!mpp_is_message(c)) c->o.tag = -1;
    return is_read;
}
