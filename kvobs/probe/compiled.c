/* Time and count calls into connectors: the same as kvobs/probe/pure.py, which is the reference, compiled.
 *
 * All numbers are 64-bit words of one page, which kvobs/page/layout.py lays out: marks of the calls in progress,
 * histograms, a ring of the last calls. They are written with plain stores, under the GIL. Whatever is rare, such as
 * a slow or failed call, is handed to Python.
 *
 * Limited API of Python 3.11, no global state: several interpreters, and several engines in a process, are apart.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define VERSION 4
#define BITS 65 /* of a duration: 0 to 64 */
#define RECORD 3 /* words: begin and duration of a call, and which it was */
#define CALLS_AT 32 /* the first bit of the number of calls in a record's last word; see kvobs/page/calls.py */
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

typedef struct {
    PyObject *Probe, *Calls, *Waits;
} State;

/* A sum of ns may wrap around, as in Python's twin: its growth is still right. */
static inline void add(int64_t *word, int64_t n) { *word = (int64_t)((uint64_t)*word + (uint64_t)n); }

/* The page, and how durations are counted in it */

typedef struct {
    PyObject_HEAD
    Py_buffer page;
    int64_t *words;
    Py_ssize_t size;         /* in words */
    Py_ssize_t ring, next;   /* positions of the first and of the next record of the ring, which ends with the page */
    Py_ssize_t sum;          /* of a histogram of calls, after its buckets */
    uint8_t bucket[BITS];    /* by the number of a duration's bits */
    PyObject *clock;         /* of tests; NULL: the machine's */
} Probe;

/* Read the clock of Python's perf_counter_ns, whose times all processes of a machine share. */
static inline int64_t now_ns(const Probe *p) {
    if (UNLIKELY(p->clock != NULL)) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyObject *now = PyObject_CallNoArgs(p->clock);
        int64_t ns = now ? PyLong_AsLongLong(now) : -1;
        Py_XDECREF(now);
        PyErr_Restore(type, error, trace);
        return ns;
    }
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void observe(const uint8_t *bucket, Py_ssize_t sum, int64_t *histogram, int64_t ns) {
    int bits = ns > 1 ? 64 - __builtin_clzll((uint64_t)(ns - 1)) : ns == 1 ? 0 : 1;
    add(&histogram[bucket[bits]], 1);
    add(&histogram[sum], ns);
}

/* Write a call into the ring, over the oldest one. */
static inline void keep(Probe *p, int64_t begin, int64_t spent, int64_t what) {
    int64_t *record = p->words + p->next;
    p->next = p->next + 2 * RECORD <= p->size ? p->next + RECORD : p->ring;
    record[0] = begin;
    record[1] = spent;
    record[2] = what;
}

static int is_within(Probe *p, Py_ssize_t at, Py_ssize_t words) {
    if (at >= 0 && words <= p->size - at) return 1;
    PyErr_Format(PyExc_ValueError, "%zd words at %zd are not in a page of %zd", words, at, p->size);
    return 0;
}

/* Calls of one connector (timed), or of the layers of several (fan-out) */

typedef struct {
    PyObject *call, *notice, *failed;
    int64_t *begun;     /* the last begin, then, if it is timed, the latest begin of a call that ended */
    int64_t *histogram;
    int64_t noticed_ns; /* a longer one is handed to `notice`, which returns the time to count */
    int64_t what;       /* of its record in the ring */
} Target;

typedef struct {
    PyObject_HEAD
    Probe *probe;
    int64_t *fan_outs; /* their number, then the end of the last one; NULL: it is one timed call */
    Py_ssize_t n;
    Target *targets;
} Calls;

/* Report an exception of kvobs's own; return -1 with any other, such as the SystemExit that a signal's handler raises in
 * the first Python code after it. */
static int report(PyObject *raised_by) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_WriteUnraisable(raised_by);
    return 0;
}

static PyObject *subject_of(PyObject *args) { return PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : Py_None; }

static inline int count(const Probe *p, const Target *t, int64_t begin, int64_t spent, PyObject *args) {
    int counted = 0;
    if (UNLIKELY(spent > t->noticed_ns)) {
        PyObject *ran = PyObject_CallFunction(t->notice, "LLO", (long long)begin, (long long)spent, subject_of(args));
        int64_t ns = ran ? PyLong_AsLongLong(ran) : -1;
        Py_XDECREF(ran);
        if (PyErr_Occurred())
            counted = report(t->notice);
        else
            spent = ns;
    }
    observe(p->bucket, p->sum, t->histogram, spent);
    return counted;
}

/* Hand an exception to `failed`, and raise it unchanged; what ends the process is raised instead. */
static void fail(const Target *t, int64_t begin, int64_t spent, PyObject *args) {
    PyObject *type, *error, *trace, *handled = PyErr_GetHandledException();
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    PyErr_SetHandledException(error); /* the context of what is raised now, as in an except block */
    PyObject *done =
        PyObject_CallFunction(t->failed, "LLOO", (long long)begin, (long long)spent, error, subject_of(args));
    int counted = done ? 0 : report(t->failed);
    Py_XDECREF(done);
    PyErr_SetHandledException(handled);
    Py_XDECREF(handled);
    if (counted == 0) {
        PyErr_Restore(type, error, trace);
        return;
    }
    Py_DECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

/* Mark that a call has ended: one that began later, on another thread or within it, may have ended before. */
static inline void mark_end(const Target *t, int64_t begin) {
    if (begin > t->begun[1]) t->begun[1] = begin;
}

static PyObject *call_one(Calls *self, PyObject *args, PyObject *keywords) {
    const Target *t = self->targets;
    int64_t begin = t->begun[0] = now_ns(self->probe);
    PyObject *answer = PyObject_Call(t->call, args, keywords);
    int64_t spent = now_ns(self->probe) - begin;
    if (UNLIKELY(!answer)) {
        fail(t, begin, spent, args);
        mark_end(t, begin);
        return NULL;
    }
    keep(self->probe, begin, spent, t->what);
    mark_end(t, begin);
    if (UNLIKELY(count(self->probe, t, begin, spent, args) < 0)) Py_CLEAR(answer);
    return answer;
}

/* The end of one call is the start of the next; the time that `notice` takes between them is not counted. */
static PyObject *call_each(Calls *self, PyObject *args, PyObject *keywords) {
    int64_t begin = now_ns(self->probe), ended = begin;
    for (const Target *t = self->targets, *end = t + self->n; t < end; t++) {
        t->begun[0] = begin;
        PyObject *answer = PyObject_Call(t->call, args, keywords);
        ended = now_ns(self->probe);
        int64_t spent = ended - begin;
        if (UNLIKELY(!answer)) {
            fail(t, begin, spent, args);
            self->fan_outs[1] = ended;
            return NULL;
        }
        Py_DECREF(answer);
        if (UNLIKELY(count(self->probe, t, begin, spent, args) < 0)) {
            self->fan_outs[1] = ended;
            return NULL;
        }
        begin = UNLIKELY(spent > t->noticed_ns) ? now_ns(self->probe) : ended;
    }
    add(&self->fan_outs[0], 1);
    self->fan_outs[1] = ended;
    return Py_NewRef(Py_None); /* not Py_RETURN_NONE, which 3.12's headers make wrong for 3.11 */
}

static PyObject *calls_call(Calls *self, PyObject *args, PyObject *keywords) {
    if (UNLIKELY(!self->targets)) {
        PyErr_SetString(PyExc_ReferenceError, "the connector's calls have been released");
        return NULL;
    }
    Py_INCREF((PyObject *)self); /* a connector may drop the last reference to it within the call */
    PyObject *answer = self->fan_outs ? call_each(self, args, keywords) : call_one(self, args, keywords);
    Py_DECREF(self);
    return answer;
}

/* Read (call, begun, histogram, noticed_ns, notice, failed). */
static int read_target(Probe *p, Target *t, PyObject *from) {
    PyObject *call, *notice, *failed;
    Py_ssize_t begun, histogram;
    long long noticed;
    if (!PyArg_ParseTuple(from, "OnnLOO;a target", &call, &begun, &histogram, &noticed, &notice, &failed)) return -1;
    if (!is_within(p, begun, 2) || !is_within(p, histogram, p->sum + 1)) return -1;
    int64_t what = (int64_t)1 << CALLS_AT | (int64_t)begun << 1;
    *t = (Target){Py_NewRef(call), Py_NewRef(notice), Py_NewRef(failed), p->words + begun, p->words + histogram, noticed, what};
    return 0;
}

/* Make a call of these targets, a tuple of tuples; `fan_outs` is the position of a fan-out's two words, or -1. */
static PyObject *new_calls(Probe *p, PyObject *targets, Py_ssize_t fan_outs) {
    State *state = PyType_GetModuleState(Py_TYPE((PyObject *)p));
    if (!state || (fan_outs >= 0 && !is_within(p, fan_outs, 2))) return NULL;
    Calls *self = PyObject_GC_New(Calls, (PyTypeObject *)state->Calls);
    if (!self) return NULL;
    Py_ssize_t n = PyTuple_Size(targets);
    self->probe = (Probe *)Py_NewRef((PyObject *)p);
    self->fan_outs = fan_outs >= 0 ? p->words + fan_outs : NULL;
    self->n = 0;
    self->targets = PyMem_Calloc(n ? n : 1, sizeof(Target));
    if (!self->targets) PyErr_NoMemory();
    for (int is_read = self->targets != NULL; is_read && self->n < n; self->n += is_read)
        is_read = read_target(p, &self->targets[self->n], PyTuple_GetItem(targets, self->n)) == 0;
    PyObject_GC_Track(self);
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static int calls_traverse(Calls *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->probe);
    for (Py_ssize_t i = 0; i < self->n; i++) {
        Py_VISIT(self->targets[i].call);
        Py_VISIT(self->targets[i].notice);
        Py_VISIT(self->targets[i].failed);
    }
    return 0;
}

static int calls_clear(Calls *self) {
    Target *targets = self->targets;
    self->targets = NULL; /* first: the objects that end here may call this */
    for (Py_ssize_t i = 0; targets && i < self->n; i++) {
        Py_XDECREF(targets[i].call);
        Py_XDECREF(targets[i].notice);
        Py_XDECREF(targets[i].failed);
    }
    PyMem_Free(targets);
    self->n = 0;
    return 0;
}

static void release(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void calls_dealloc(Calls *self) {
    PyObject_GC_UnTrack(self);
    calls_clear(self);
    Py_DECREF((PyObject *)self->probe);
    release((PyObject *)self);
}

static PyType_Slot calls_slots[] = {
    {Py_tp_call, calls_call}, {Py_tp_traverse, calls_traverse}, {Py_tp_clear, calls_clear}, {Py_tp_dealloc, calls_dealloc}, {0, NULL}};
static PyType_Spec calls_spec = {"kvobs.probe.compiled.Calls", sizeof(Calls), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, calls_slots};

/* The time that a step waits for the connectors, in a hook of layers and in the hook of each step that goes with it */

typedef struct {
    int64_t *layers; /* the sum of its calls of the layer hook; NULL: it has none */
    int64_t *step;   /* and of the step hook */
    int64_t *stalls; /* histogram */
    int64_t what;    /* of the record of its layers in the ring */
    int64_t layers_before, step_before;
} Wait;

typedef struct {
    PyObject_HEAD
    Probe *probe;
    int64_t *fan_outs, fan_outs_before;
    uint8_t bucket[BITS];
    Py_ssize_t sum;
    Py_ssize_t n;
    Wait *waits;
} Waits;

static PyObject *waits_close(Waits *self, PyObject *is_waiting) {
    int waits = PyObject_IsTrue(is_waiting);
    PyObject *times = PyList_New(self->n);
    if (!times || waits < 0) {
        Py_XDECREF(times);
        return NULL;
    }
    int64_t fan_outs = self->fan_outs[0] - self->fan_outs_before;
    self->fan_outs_before += fan_outs;
    for (Py_ssize_t i = 0; i < self->n; i++) {
        Wait *w = &self->waits[i];
        int64_t layers = w->layers ? *w->layers - w->layers_before : 0, step = *w->step - w->step_before;
        w->layers_before += layers;
        w->step_before += step;
        if (w->layers && fan_outs) keep(self->probe, self->fan_outs[1] - layers, layers, fan_outs << CALLS_AT | w->what);
        int64_t stall = layers + (waits ? step : 0);
        if (stall) observe(self->bucket, self->sum, w->stalls, stall);
        PyObject *time = PyLong_FromLongLong(layers + step);
        if (!time || PyList_SetItem(times, i, time) < 0) {
            Py_DECREF(times);
            return NULL;
        }
    }
    return times;
}

static void waits_dealloc(Waits *self) {
    PyMem_Free(self->waits);
    Py_XDECREF((PyObject *)self->probe);
    release((PyObject *)self);
}

static PyMethodDef waits_methods[] = {
    {"close", (PyCFunction)waits_close, METH_O, "End a step, which waited for the step hook or not; return ns by row."}, {NULL}};
static PyType_Slot waits_slots[] = {{Py_tp_methods, waits_methods}, {Py_tp_dealloc, waits_dealloc}, {0, NULL}};
static PyType_Spec waits_spec = {
    "kvobs.probe.compiled.Waits", sizeof(Waits), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, waits_slots};

/* Methods of the probe */

/* Read bytes; not by a format with '#', which Python 3.13's headers make something else for older ones. */
static int read_buckets(PyObject *from, Py_ssize_t sum, uint8_t *to) {
    char *buckets;
    Py_ssize_t n;
    if (PyBytes_AsStringAndSize(from, &buckets, &n) < 0) return -1;
    for (Py_ssize_t i = 0; i < n; i++)
        if ((uint8_t)buckets[i] >= sum) n = -1;
    if (n != BITS) {
        PyErr_Format(PyExc_ValueError, "buckets are %d numbers below %zd", BITS, sum);
        return -1;
    }
    memcpy(to, buckets, BITS);
    return 0;
}

/* Probe(words, ring, buckets, sum, clock=None) */
static PyObject *probe_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *words, *buckets, *clock = Py_None;
    Py_ssize_t ring, sum;
    if (!PyArg_ParseTuple(args, "OnOn|O:Probe", &words, &ring, &buckets, &sum, &clock)) return NULL;
    Probe *self = (Probe *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    self->ring = self->next = ring;
    self->sum = sum;
    self->clock = clock == Py_None ? NULL : Py_NewRef(clock);
    if (PyObject_GetBuffer(words, &self->page, PyBUF_WRITABLE) == 0) {
        self->words = self->page.buf;
        self->size = self->page.len / (Py_ssize_t)sizeof(int64_t);
        if (is_within(self, ring, RECORD) && read_buckets(buckets, sum, self->bucket) == 0) return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

static void probe_dealloc(Probe *self) {
    if (self->page.obj) PyBuffer_Release(&self->page);
    Py_XDECREF(self->clock);
    release((PyObject *)self);
}

static PyObject *probe_timed(Probe *self, PyObject *args) {
    PyObject *targets = PyTuple_Pack(1, args), *calls = targets ? new_calls(self, targets, -1) : NULL;
    Py_XDECREF(targets);
    return calls;
}

static PyObject *probe_fan_out(Probe *self, PyObject *args) {
    PyObject *targets;
    Py_ssize_t fan_outs;
    if (!PyArg_ParseTuple(args, "O!n:fan_out", &PyTuple_Type, &targets, &fan_outs)) return NULL;
    if (fan_outs < 0) return PyErr_Format(PyExc_ValueError, "%zd is no position", fan_outs);
    return new_calls(self, targets, fan_outs);
}

/* waits(rows, fan_outs, buckets, sum): a row is (sum of layers or -1, sum of the step hook, stalls, what) */
static PyObject *probe_waits(Probe *self, PyObject *args) {
    State *state = PyType_GetModuleState(Py_TYPE((PyObject *)self));
    PyObject *rows, *buckets;
    Py_ssize_t fan_outs, sum;
    if (!state || !PyArg_ParseTuple(args, "O!nOn:waits", &PyTuple_Type, &rows, &fan_outs, &buckets, &sum)) return NULL;
    Waits *waits = PyObject_New(Waits, (PyTypeObject *)state->Waits);
    if (!waits) return NULL;
    waits->probe = (Probe *)Py_NewRef((PyObject *)self);
    waits->n = PyTuple_Size(rows);
    waits->sum = sum;
    waits->waits = PyMem_Calloc(waits->n ? waits->n : 1, sizeof(Wait));
    if (!waits->waits) PyErr_NoMemory();
    int is_read = waits->waits && is_within(self, fan_outs, 2) && read_buckets(buckets, sum, waits->bucket) == 0;
    for (Py_ssize_t i = 0; is_read && i < waits->n; i++) {
        Py_ssize_t layers, step, stalls;
        long long what;
        is_read = PyArg_ParseTuple(PyTuple_GetItem(rows, i), "nnnL;a row", &layers, &step, &stalls, &what) &&
            (layers < 0 || is_within(self, layers, 1)) && is_within(self, step, 1) && is_within(self, stalls, sum + 1);
        if (!is_read) break;
        int64_t *words = self->words, *of_layers = layers < 0 ? NULL : words + layers;
        waits->waits[i] = (Wait){of_layers, words + step, words + stalls, what, of_layers ? *of_layers : 0, words[step]};
    }
    if (!is_read) {
        Py_DECREF(waits);
        return NULL;
    }
    waits->fan_outs = self->words + fan_outs;
    waits->fan_outs_before = waits->fan_outs[0];
    return (PyObject *)waits;
}

static PyObject *probe_note(Probe *self, PyObject *args) {
    long long begin, spent, what;
    if (!PyArg_ParseTuple(args, "LLL:note", &begin, &spent, &what)) return NULL;
    keep(self, begin, spent, what);
    return Py_NewRef(Py_None);
}

static PyMethodDef probe_methods[] = {
    {"timed", (PyCFunction)probe_timed, METH_VARARGS, "Return a call that is timed."},
    {"fan_out", (PyCFunction)probe_fan_out, METH_VARARGS, "Return a call of several connectors, each of which is timed."},
    {"waits", (PyCFunction)probe_waits, METH_VARARGS, "Return what measures the waits of steps."},
    {"note", (PyCFunction)probe_note, METH_VARARGS, "Write a call into the ring."},
    {NULL}};
static PyType_Slot probe_slots[] = {{Py_tp_new, probe_new}, {Py_tp_methods, probe_methods}, {Py_tp_dealloc, probe_dealloc}, {0, NULL}};
static PyType_Spec probe_spec = {"kvobs.probe.compiled.Probe", sizeof(Probe), 0, Py_TPFLAGS_DEFAULT, probe_slots};

/* The module */

static int fill(PyObject *module) {
    State *state = PyModule_GetState(module);
    if (!(state->Probe = PyType_FromModuleAndSpec(module, &probe_spec, NULL)) ||
        !(state->Calls = PyType_FromModuleAndSpec(module, &calls_spec, NULL)) ||
        !(state->Waits = PyType_FromModuleAndSpec(module, &waits_spec, NULL)))
        return -1;
    if (PyModule_AddObjectRef(module, "Probe", state->Probe) < 0) return -1;
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    Py_VISIT(state->Probe);
    Py_VISIT(state->Calls);
    Py_VISIT(state->Waits);
    return 0;
}

static int module_clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->Probe);
    Py_CLEAR(state->Calls);
    Py_CLEAR(state->Waits);
    return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kvobs.probe.compiled", "Time and count calls into connectors.",
    sizeof(State), NULL, module_slots, module_traverse, module_clear, module_free};

PyMODINIT_FUNC PyInit_compiled(void) { return PyModuleDef_Init(&definition); }
