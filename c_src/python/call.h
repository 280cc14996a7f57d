/* The bridge between Python objects and the engine: what its files share, a call above all. See bridge.c. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "group/entries.h"
#include "python/dlpack.h"

enum { NO_PEER = -2, ANY_PEER = -1 };

/* A dtype of torch's. */
typedef struct {
    PyObject *dtype;
    size_t size;
    int code;     /* enum mpp_dtype; -1: it can only be moved */
    int is_float; /* it may be a view of other numbers than its memory holds: their negative, or conjugate */
    int is_complex;
} dtype_info;

#define MPP_OBJECT(name) PyObject *name;
#define MPP_NUMBER(name) unsigned long long name;
#define MPP_INT(name) int name;
#define MPP_FLAG(name) char name;

/* What starting an operation takes of a group: `_bridge.Calls`, whose stub says what each is. Python is to be asked
 * before each call while `broken` and `coalescing` are not None, and `extensions` is not empty. */
#define MPP_GROUP_NUMBERS(X) X(handle) X(sequence) X(messages) X(in_c)
#define MPP_GROUP_INTS(X) X(rank) X(size) X(largest_tag)
#define MPP_GROUP_FLAGS(X) X(compares) X(python_only)
#define MPP_GROUP_OBJECTS(X) X(broken) X(coalescing) X(extensions) X(subject) X(last)
typedef struct {
    PyObject_HEAD MPP_GROUP_NUMBERS(MPP_NUMBER) MPP_GROUP_INTS(MPP_INT) MPP_GROUP_FLAGS(MPP_FLAG)
        MPP_GROUP_OBJECTS(MPP_OBJECT) double timeout;
} calls_object;

/* The record of a call: `_bridge.Call`, whose stub says what each is. */
#define MPP_CALL_OBJECTS(X) X(subject) X(operation) X(peer) X(inputs) X(outputs) X(lengths) X(work) X(frames)
#define MPP_CALL_NUMBERS(X) X(collective) X(message) X(sequence) X(number) X(begun) X(tag)
typedef struct {
    PyObject_HEAD MPP_CALL_OBJECTS(MPP_OBJECT) MPP_CALL_NUMBERS(MPP_NUMBER) double limit, extension;
} call_object;

/* The tensors that an operation reads, or writes, and their shapes for its record. */
typedef struct {
    PyObject *tensors, *shapes;
} tensor_args;

typedef struct {
    const dtype_info *type;
    uintptr_t address;
    size_t count, bytes;
    int64_t rows; /* dimension 0; 1 where there is none */
} operand;

typedef struct call call;
typedef struct mpp_method mpp_method;
typedef uintptr_t starter(const mpp_operands *o);
typedef int reader(call *c, PyObject *args);
struct call { /* what it refers to is borrowed, but for the group, tensors, shapes and lists */
    PyObject *self, *name;
    const mpp_method *method;
    calls_object *group;
    PyObject *opts;
    int sync;
    mpp_operands o;
    tensor_args out, in;            /* the results, and what they are made of; without the latter: of themselves */
    PyObject *finish, *keep, *then; /* as engine/work.py says; NULL: none */
    PyObject *results;              /* the Work's tensors where these are not what C is given; or NULL */
    PyObject *lists;                /* in how many its future has them; NULL: in one */
    PyObject *device;               /* of its tensors; NULL: there are none, None: host memory */
    int is_plain;                   /* Python has made the operands: of their types at least */
    int is_special;                 /* Python is asked before it begins, and told of its Work */
    double extension;               /* of the deadline */
    operand a, b;
    mpp_reduction how;
    uintptr_t *addresses; /* two lists of a group's size each: of what is sent, and of what is received */
    size_t *lengths;      /* the operands refer to them */
    size_t bytes;         /* about so many are moved */
    size_t start;         /* where in the engine's table that is */
};

static inline PyObject *shared(PyObject *object) { /* a new reference */
    Py_INCREF(object);
    return object;
}

static inline int set(PyObject *work, PyObject *name, PyObject *value) { /* steals the value */
    int is_set = value && !PyObject_SetAttr(work, name, value);
    Py_XDECREF(value);
    return is_set;
}

static inline int mpp_is_message(const call *c) { return c->o.peer != NO_PEER; }

/* patience.c: how long a call waits for its operation in C; told of messages that are begun. */
int64_t mpp_patience(const call *c);
void mpp_note_message(const call *c, uintptr_t op);

/* operands.c: what an argument is, as far as it is plain; else 0, with an exception where mpp_refuse sets one. A tensor
 * is one of torch's, dense and in host memory, or a `Plain` of Python's, which says where a tensor's numbers are.
 * `place` is that of the options. */
extern const mpp_entries *mpp_engine;
/* Classes of tensors/arguments.py. */
#define MPP_WRONG_VALUE "ArgumentError"
#define MPP_WRONG_DTYPE "ArgumentTypeError"
#define MPP_NO_TENSORS "NoTensorsError"
/* What is wrong with a call, raised as one of these, in the format of PyErr_Format; 0. Not before Python has made its
 * tensors plain: until then another kind of tensor may be the reason. The first of several is kept. */
int mpp_refuse(const call *c, const char *kind, const char *format, ...);
static inline const char *mpp_put_of(const call *c, const tensor_args *s) { return s == &c->out ? "output" : "input"; }
int mpp_make_tensor_args(tensor_args *s, Py_ssize_t tensors);
int mpp_make_lists(call *c, int in, int out); /* of what the operation reads, and writes */
void mpp_forget(call *c);                     /* all that is not borrowed */
Py_ssize_t mpp_length_of(PyObject *list);     /* -1: it is neither a list nor a tuple */
PyObject *mpp_item_of(PyObject *list, Py_ssize_t i);
/* As where c10d takes a list for each device; or the argument. NULL: there are several lists. */
PyObject *mpp_only_list_of(const call *c, PyObject *argument);
int mpp_are_alike(const call *c, const dtype_info *one, const dtype_info *other);
int mpp_read_single(call *c, PyObject *argument, tensor_args *s, operand *o);
int mpp_read_list(call *c, PyObject *argument, tensor_args *s, const dtype_info **type, int which);
void mpp_fill_rows(call *c, int which, uintptr_t first, size_t length);
int mpp_read_options(call *c, PyObject *args, Py_ssize_t place);
int mpp_as_int(PyObject *number, int *value);
int mpp_as_long(PyObject *number, int64_t *value);
int mpp_read_rank(const call *c, PyObject *given, const char *what, int *rank); /* of the group */
int mpp_read_root(call *c);
int mpp_read_reduction(call *c, const dtype_info *type);

/* overlaps.c: whether nothing that is written to lies in memory that is read, or is written to twice. A rank's `own`
 * tensor may be read and written in one place. */
typedef struct {
    const uintptr_t *addresses;
    const size_t *lengths; /* in bytes */
    int count, own;
} mpp_tensors;
int mpp_operands_are_apart(const operand *a, const operand *b);
int mpp_lists_are_apart(const mpp_tensors *read, const mpp_tensors *written);

/* What the bridge was told of Python's side (bridge_module.c); all zero before. */
typedef struct {
    PyObject *calls, *call, *method, *plain, *work, *pending, *lock; /* types */
    PyObject *is_profiled, *is_registering;                          /* of this thread, of all: functions */
    PyObject *modes;               /* how many TorchDispatchModes it has entered: a function */
    PyObject *recorder, *registry; /* dictionaries: of a module, and the engine's */
    PyObject *last;                /* of all groups' calls the record of the last */
    PyObject *watch;               /* a method of the engine's */
    PyObject *prepare, *follow;    /* of what is special: functions of starting.py */
    PyObject *premul_factor;       /* of a PREMUL_SUM: a function */
    PyObject *reduction;           /* of a dtype and an operation: a function, raises what is wrong with them */
    PyObject *not_the_users;       /* beginnings of the names of files: torch's and our own */
    PyObject *front_end;           /* code that does without a Work for what is complete */
    char is_ready, is_watched;     /* connected; with a thread that completes what nobody waits for */
} mpp_bridge_state;
extern mpp_bridge_state bridge_state;

/* Interned: attributes of a group, a module, a Work, frames, tensors and options; as C has them, and their names. */
/* clang-format off */
#define MPP_INTERNED(X)                                                                                                \
    X(calls, "_calls") X(current, "current") X(append, "append") X(opts_word, "opts") X(handle, "handle")              \
    X(finished, "finished") X(group, "group") X(call, "call") X(opts, "_opts") X(tensors, "_tensors") X(keep, "_keep") \
    X(finish, "_finish") X(then, "_then") X(future, "_future") X(error, "_error") X(caller, "caller")                  \
    X(wait, "wait") X(lock, "_lock") X(file, "co_filename") X(back, "f_back") X(lists, "_lists") X(source, "_source")  \
    X(root_tensor, "rootTensor") X(instruction, "f_lasti") X(second_halves, "second_halves")                           \
    X(dtype, "dtype") X(is_neg, "is_neg") X(is_conj, "is_conj") X(is_sparse, "is_sparse")                              \
    X(storage_offset, "storage_offset")                                                                                \
    X(async_op, "asyncOp") X(reduce_op, "reduceOp") X(root_rank, "rootRank") X(cpu, "cpu")
/* clang-format on */
#define MPP_FIELD(name, text) PyObject *name;
typedef struct {
    MPP_INTERNED(MPP_FIELD)
} mpp_interned;
extern mpp_interned interned;

/* A method of a group. */
struct mpp_method {
    PyObject_HEAD PyObject *python; /* what makes plain tensors of others, or says what is wrong */
    PyObject *name;                 /* of the operation */
    PyObject *start_name;
    size_t start; /* in the engine's table */
    reader *read;
    int operands, has_root, reduces; /* of c10d's arguments so many come before the options */
    int writes_blocks, in_one;       /* of blocks for all ranks: else it reads them; they lie in one tensor */
};
enum { NO_OPTIONS = -1 };

/* methods.c: what Python's table of operations says of a method, 0: C does not know these; and how its arguments are
 * read: 1; or 0, with an exception (mpp_refuse) where they are wrong, and without one where Python is to see to the
 * call: tensors are not plain, or results lie where is read. */
size_t mpp_find_starter(const char *name); /* in the engine's table; 0: there is none */
int mpp_find_method(mpp_method *m, const char *start, const char *roles);
int mpp_read_call(call *c, PyObject *args);

/* timeline.c: which of the program's calls this is, for the timeline; nothing without one. */
PyObject *mpp_set_timeline(PyObject *module, PyObject *function);
void mpp_note_site(const call *c, uint64_t sequence);
void mpp_note_work(PyObject *work, call_object *record);
void mpp_note_asked_for(PyObject *work);
PyObject *mpp_user_frames(void);
PyObject *mpp_asked_for(PyObject *module, PyObject *future);

PyObject *mpp_call_operation(PyObject *method, PyObject *args, PyObject *named);
PyObject *mpp_start_plain(PyObject *module, PyObject *args);
PyObject *mpp_wait_for(PyObject *module, PyObject *work);
PyObject *mpp_last_call(PyObject *module, PyObject *unused);

/* Once per process; an exception where one is missing or not as expected. */
int mpp_know_tensors(PyObject *capsule, PyObject *types, PyObject *dtypes, PyObject *operations);
