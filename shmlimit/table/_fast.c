/* `SharedTable.take` as a builtin: arguments in, the helper's own function, a `Decision` out.
 *
 * Nothing is decided here, and nothing is said: what isn't plain (an argument by name, a key or cost of another class, a
 * time of the caller's) goes to the Python method as it came, a policy that wasn't seen before is asked for, and an
 * answer that isn't plain is told by Python.  The function is the one of the library that ctypes has loaded, so there is
 * one algorithm, and a build of the helper for tests is used here as well.
 *
 * The limited API of Python 3.10: one file for every CPython from there on.
 * SAFETY: the GIL is held all the time, which guards what is kept here; a build without one uses ctypes (native.py). */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stddef.h>

#include "_call.h"

#define INT_MAX_OF_PYTHON ((1 << 30) - 1) /* _INT_MAX in table.py, which says why */

/* A policy that was seen.  An address is never another object's, since the entry keeps this one alive. */
struct known {
    PyObject *policy;
    PyObject *keep;                        /* what `prepared` lies in: it keeps the table mapped */
    const struct policy *prepared;
};

/* By the address of the policy object, each in one of PROBES places; the first gives way when all are taken. */
enum { KNOWN_BITS = 8, KNOWN = 1 << KNOWN_BITS, PROBES = 4 };

typedef struct {
    PyObject_HEAD
    int (*take)(struct call *, const unsigned char *, int, int);
    PyTypeObject *decision;                /* the class, a tuple with names */
    allocfunc allocate;                    /* of it, where it may be filled as it was allocated; else NULL */
    PyObject *prepare, *otherwise, *unusual; /* what Python does: see `_bind` in table.py */
    int closed;
    struct known known[KNOWN];
} Binding;

/* ---- the policies that were seen ------------------------------------------------------------------------------------- */

static struct known *place(Binding *self, const PyObject *policy, unsigned probe) {
    uint64_t mixed = (uint64_t)(uintptr_t)policy * UINT64_C(0x9e3779b97f4a7c15);
    return &self->known[((mixed >> (64 - KNOWN_BITS)) + probe) % KNOWN];
}

static const struct known *find(Binding *self, const PyObject *policy) {
    for (unsigned probe = 0; probe < PROBES; probe++) {
        const struct known *known = place(self, policy, probe);
        if (known->policy == policy)
            return known;
    }
    return NULL;
}

/* HAZARD: what is let go of may run any code, which may come back to this very entry: so it goes last. */
static void put(struct known *place, struct known known) {
    struct known before = *place;
    *place = known;
    Py_XDECREF(before.policy);
    Py_XDECREF(before.keep);
}

static void forget_all(Binding *self) {
    for (int i = 0; i < KNOWN; i++)
        put(&self->known[i], (struct known){0});
}

/* Asks Python for `(address, keep)` of a policy.  A table that was closed meanwhile keeps nothing of it; the call under way
 * goes on.  Gives a new reference to `keep`, or NULL with an exception. */
static PyObject *meet(Binding *self, PyObject *policy, const struct policy **prepared) {
    PyObject *told = PyObject_CallFunctionObjArgs(self->prepare, policy, NULL);
    PyObject *address = told ? PyTuple_GetItem(told, 0) : NULL;
    PyObject *keep = address ? PyTuple_GetItem(told, 1) : NULL;
    *prepared = keep ? PyLong_AsVoidPtr(address) : NULL;
    if (!*prepared) {
        Py_XDECREF(told);
        return NULL;
    }
    Py_INCREF(keep);
    Py_DECREF(told);
    if (!self->closed) {
        struct known *at = place(self, policy, 0);
        for (unsigned probe = 0; probe < PROBES; probe++)
            if (!place(self, policy, probe)->policy) {
                at = place(self, policy, probe);
                break;
            }
        Py_INCREF(policy);
        Py_INCREF(keep);
        put(at, (struct known){policy, keep, *prepared});
    }
    return keep;
}

/* ---- take ------------------------------------------------------------------------------------------------------------ */

/* The Python method, with the arguments as they came. */
static PyObject *otherwise(Binding *self, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *result = NULL, *by_name = PyDict_New(), *by_place = PyTuple_New(n);
    if (!by_name || !by_place)
        goto end;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(by_place, i, args[i]);
    }
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyDict_SetItem(by_name, PyTuple_GetItem(names, i), args[n + i]) < 0)
            goto end;
    result = PyObject_Call(self->otherwise, by_place, by_name);
end:
    Py_XDECREF(by_name);
    Py_XDECREF(by_place);
    return result;
}

/* Whether the arguments by name, if any, say no more than `now_us=None`: so stores pass theirs on. */
static int is_now_none(PyObject *names, PyObject *const *values) {
    return !names || PyTuple_Size(names) == 0 ||
           (PyTuple_Size(names) == 1 && values[0] == Py_None &&
            PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "now_us") == 0);
}

/* `tuple.__new__(Decision, values)`, without the call. */
static PyObject *from_values(Binding *self, PyObject *values) {
    PyObject *args = PyTuple_Pack(1, values);
    newfunc new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    PyObject *decision = args ? new_tuple(self->decision, args, NULL) : NULL;
    Py_XDECREF(args);
    return decision;
}

/* Puts the six values of an answer into a new tuple, of which a reference is taken (and given up on an error). */
static PyObject *filled(PyObject *tuple, const struct call *call) {
    const int64_t numbers[] = {call->limit, call->remaining, call->reset_us, call->retry_after_us, call->next_us};
    int failed = !tuple || PyTuple_SetItem(tuple, 0, PyBool_FromLong(call->allowed)) < 0;
    for (int i = 0; i < 5 && !failed; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        failed = !number || PyTuple_SetItem(tuple, i + 1, number) < 0;
    }
    if (!failed)
        return tuple;
    Py_XDECREF(tuple);
    return NULL;
}

static PyObject *answer(Binding *self, int status, const struct call *call) {
    if (!status && self->allocate)
        return filled(self->allocate(self->decision, 6), call);
    PyObject *values = filled(PyTuple_New(6), call);
    if (!values)
        return NULL;
    PyObject *decision =
        status ? PyObject_CallFunction(self->unusual, "iO", status, values) : from_values(self, values);
    Py_DECREF(values);
    return decision;
}

/* PERF: a `Decision` may be filled as it was allocated (60 ns less), if that makes the same of it as Python does.  A Python
 * whose tuples keep their hash (3.14) would find none in it: then not.  1 when that is known, -1 with an exception. */
static int try_allocating(Binding *self) {
    const struct call call = {.limit = 1};
    PyObject *values = filled(PyTuple_New(6), &call);
    PyObject *wanted = values ? from_values(self, values) : NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(self->decision, Py_tp_alloc);
    PyObject *got = wanted ? filled(allocate(self->decision, 6), &call) : NULL;
    int same = got ? PyObject_RichCompareBool(wanted, got, Py_EQ) : -1;
    if (same > 0)
        same = PyObject_Hash(wanted) == PyObject_Hash(got);
    if (same > 0)
        self->allocate = allocate;
    Py_XDECREF(values);
    Py_XDECREF(wanted);
    Py_XDECREF(got);
    return same < 0 ? -1 : 1;
}

static PyObject *take(PyObject *object, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    Binding *self = (Binding *)object;
    const char *key = NULL;
    Py_ssize_t size = 0;
    long cost = 1;
    int overflow;
    if (!self->otherwise) {                /* the collector has taken it apart */
        PyErr_SetString(PyExc_ReferenceError, "the table is gone");
        return NULL;
    }
    if (n < 2 || n > 3 || !is_now_none(names, args + n))
        return otherwise(self, args, n, names);
    if (PyUnicode_CheckExact(args[1])) {
        key = PyUnicode_AsUTF8AndSize(args[1], &size);
        if (!key)
            PyErr_Clear();                 /* half of a surrogate pair */
    } else if (PyBytes_CheckExact(args[1])) {
        key = PyBytes_AsString(args[1]);
        size = PyBytes_Size(args[1]);
    }
    if (n == 3)                            /* -1 also where it is too large for a long */
        cost = PyLong_CheckExact(args[2]) ? PyLong_AsLongAndOverflow(args[2], &overflow) : -1;
    if (!key || size > INT_MAX_OF_PYTHON || cost < 0 || cost > INT_MAX_OF_PYTHON)
        return otherwise(self, args, n, names);

    const struct known *known = find(self, args[0]);
    struct call call = {.now_us = -1};
    PyObject *keep;
    if (known) {
        call.policy = known->prepared;
        keep = known->keep;
        Py_INCREF(keep);                   /* whatever happens to the entry meanwhile */
    } else {
        keep = meet(self, args[0], &call.policy);
        if (!keep)
            return NULL;
    }
    int status = self->take(&call, (const unsigned char *)key, (int)size, (int)cost);
    PyObject *result = answer(self, status, &call);
    Py_DECREF(keep);
    return result;
}

/* ---- the type and the module ----------------------------------------------------------------------------------------- */

static PyObject *forget(PyObject *object, PyObject *Py_UNUSED(unused)) {
    ((Binding *)object)->closed = 1;
    forget_all((Binding *)object);
    Py_RETURN_NONE;
}

static PyObject *new_binding(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *address, *decision, *prepare, *no, *unusual;
    if (named && PyDict_Size(named) > 0) {
        PyErr_SetString(PyExc_TypeError, "Binding takes no arguments by name");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!OOO", &PyLong_Type, &address, &PyType_Type, &decision, &prepare, &no, &unusual))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)decision, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "a decision is a tuple");
        return NULL;
    }
    void *function = PyLong_AsVoidPtr(address);
    if (!function) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no function");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Binding *self = (Binding *)allocate(type, 0);
    if (!self)
        return NULL;
    memcpy(&self->take, &function, sizeof function);
    Py_INCREF(decision), self->decision = (PyTypeObject *)decision;
    Py_INCREF(prepare), self->prepare = prepare;
    Py_INCREF(no), self->otherwise = no;
    Py_INCREF(unusual), self->unusual = unusual;
    if (try_allocating(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* A table has its binding, and that the table's methods: a cycle, which only the collector ends where nobody closes it. */
static int traverse(PyObject *object, visitproc visit, void *arg) {
    Binding *self = (Binding *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->decision);
    Py_VISIT(self->prepare);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->unusual);
    for (int i = 0; i < KNOWN; i++) {
        Py_VISIT(self->known[i].policy);
        Py_VISIT(self->known[i].keep);
    }
    return 0;
}

static int clear(PyObject *object) {
    Binding *self = (Binding *)object;
    self->closed = 1;
    forget_all(self);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->prepare);
    Py_CLEAR(self->unusual);
    Py_CLEAR(self->decision);
    return 0;
}

static void deallocate(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL | METH_KEYWORDS,
     "take($self, policy, key, cost=1, *, now_us=None)\n--\n\nSee `SharedTable.take`."},
    {"forget", forget, METH_NOARGS, "Lets go of every policy, and keeps none from now on: the table is closed."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new_binding},     {Py_tp_dealloc, deallocate}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},         {Py_tp_methods, methods},    {Py_tp_doc, "`take` of one table."},
    {0},
};

static PyType_Spec spec = {
    "shmlimit.table._fast.Binding", sizeof(Binding), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

static int execute(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (!type || PyModule_AddObject(module, "Binding", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    return PyModule_AddIntConstant(module, "ABI", ABI);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_fast", .m_doc = "`SharedTable.take` as a builtin.", .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__fast(void) { return PyModuleDef_Init(&definition); }
