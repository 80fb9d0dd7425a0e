/* A small pool of helper threads, shared by every kernel of the process.
 *
 * A caller takes part in its own work and borrows helpers that are idle. Nothing is queued: a call
 * that finds no helper does all the work itself, so calls never wait for each other, and the number
 * of running threads stays near the limit however many threads call at once.
 *
 * A helper's `state` is a phase, and the number of times it was called, so that nobody takes one call for another:
 *
 *     EMPTY ----caller----> CLAIMED --caller--> CALLED --helper--> WORKING --helper--> IDLE
 *                              ^                   |                                  |  |
 *                              |                   +--caller, who takes it back-----> |  |
 *                              +-----------------------caller-----------------------+  |
 *                              +--------caller--------- ASLEEP <-------helper----------+
 *
 * A caller that has run out of tasks takes back the helpers that have not begun: it never waits for one that the
 * system has not run yet. For the others it waits by a count in the job, which a helper lowers when it has left it.
 *
 * Threads and locks are CPython's portable ones (they need no interpreter state), so the pool is the
 * same on every platform. A forked child has none of its parent's threads: it forgets the pool and
 * starts anew.
 *
 * Where another runtime keeps threads in the same process, OpenMP's beside a model's other layers, two sets of them
 * take the CPUs from each other: its threads spin after their work and ours wait, or sleep when they are wanted. Then
 * its threads can do the tasks: `pool_team` is its way to call a function on each of them.
 */
#ifndef PAGEDKV_POOL_H
#define PAGEDKV_POOL_H

#include <Python.h>
#include <stdatomic.h>
#include <string.h>

#ifndef _WIN32
#include <pthread.h>
#include <sched.h>
#endif

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define pool_relax() _mm_pause()
#elif defined(__aarch64__) && defined(__GNUC__)
#define pool_relax() __asm__ __volatile__("yield")
#else
#define pool_relax() ((void)0)
#endif

#define POOL_MAX_HELPERS 255
/* About 20 us: long enough to bridge the gap between two layers' kernels, short enough to leave the
 * core to whoever computes the rest of the layer. */
#define POOL_SPINS 4000

typedef void (*pool_task)(void *context, Py_ssize_t index);

enum { POOL_EMPTY = 0, POOL_CLAIMED, POOL_CALLED, POOL_WORKING, POOL_IDLE, POOL_ASLEEP, POOL_PHASES = 8 };

typedef struct {
    pool_task task;
    void *context;
    Py_ssize_t n_tasks;
    _Atomic Py_ssize_t next; /* the first task that nobody has claimed */
    atomic_int n_helping;    /* helpers that may still look at this job */
} pool_job;

typedef struct {
    atomic_uint state;        /* number of calls * POOL_PHASES + phase */
    pool_job *job;            /* written by the caller between CLAIMED and CALLED */
    PyThread_type_lock wake;  /* locked, but for the moment in which a sleeper is called */
} pool_helper;

/* GOMP_parallel's signature, which the OpenMP runtimes of GCC and LLVM have: fn(data) on every thread of a team. */
typedef void (*pool_team)(void (*fn)(void *data), void *data, unsigned n_threads, unsigned flags);

static pool_helper pool_helpers[POOL_MAX_HELPERS];
static _Atomic(pool_team) pool_borrowed_team = NULL;
static atomic_int pool_limit = 1;   /* threads that may compute at once when a call names no number */
static atomic_int pool_running = 0; /* callers and helpers that compute now */

static void pool_work(pool_job *job) {
    for (;;) {
        Py_ssize_t index = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (index >= job->n_tasks)
            return;
        job->task(job->context, index);
    }
}

static void pool_work_in_team(void *job) { pool_work((pool_job *)job); }

static void pool_helper_main(void *arg) {
    pool_helper *self = (pool_helper *)arg;
    int spins = 0;
    for (;;) {
        unsigned seen = atomic_load_explicit(&self->state, memory_order_acquire), call = seen - seen % POOL_PHASES;
        if (seen % POOL_PHASES == POOL_CALLED) {
            if (!atomic_compare_exchange_strong(&self->state, &seen, call + POOL_WORKING))
                continue; /* taken back */
            pool_job *job = self->job;
            pool_work(job);
            /* Idle first, so that the caller finds this helper for its next job. */
            atomic_store_explicit(&self->state, call + POOL_IDLE, memory_order_release);
            atomic_fetch_sub_explicit(&job->n_helping, 1, memory_order_release); /* and the job may be gone */
            spins = 0;
        } else if (++spins < POOL_SPINS) {
            pool_relax();
        } else if (seen % POOL_PHASES == POOL_IDLE &&
                   atomic_compare_exchange_strong(&self->state, &seen, call + POOL_ASLEEP)) {
            PyThread_acquire_lock(self->wake, WAIT_LOCK); /* until a caller has set CALLED */
            spins = 0;
        }
    }
}

/* Calls one idle helper, or a new one, to the job; NULL if there is none. `call`: what its state is from now on. */
static pool_helper *pool_borrow(pool_job *job, int *cursor, unsigned *call) {
    for (; *cursor < POOL_MAX_HELPERS; ++*cursor) {
        pool_helper *helper = &pool_helpers[*cursor];
        unsigned seen = atomic_load_explicit(&helper->state, memory_order_relaxed), phase = seen % POOL_PHASES;
        if (phase != POOL_EMPTY && phase != POOL_IDLE && phase != POOL_ASLEEP)
            continue;
        const unsigned next = seen - phase + POOL_PHASES;
        if (!atomic_compare_exchange_strong(&helper->state, &seen, next + POOL_CLAIMED))
            continue;
        ++*cursor;
        helper->job = job;
        if (phase == POOL_EMPTY && helper->wake == NULL) {
            helper->wake = PyThread_allocate_lock();
            if (helper->wake != NULL)
                PyThread_acquire_lock(helper->wake, NOWAIT_LOCK);
        }
        if (helper->wake == NULL) {
            atomic_store(&helper->state, next + POOL_EMPTY);
            return NULL;
        }
        *call = next + POOL_CALLED;
        atomic_fetch_add_explicit(&job->n_helping, 1, memory_order_relaxed);
        atomic_store_explicit(&helper->state, *call, memory_order_release);
        if (phase == POOL_ASLEEP) {
            PyThread_release_lock(helper->wake);
        } else if (phase == POOL_EMPTY) {
            if (PyThread_start_new_thread(pool_helper_main, helper) == PYTHREAD_INVALID_THREAD_ID) {
                atomic_store(&helper->state, next + POOL_EMPTY);
                atomic_fetch_sub_explicit(&job->n_helping, 1, memory_order_relaxed);
                return NULL;
            }
        }
        return helper;
    }
    return NULL;
}

/* Takes a helper back that has not begun. */
static void pool_take_back(pool_job *job, pool_helper *helper, unsigned call) {
    if (atomic_compare_exchange_strong(&helper->state, &call, call - POOL_CALLED + POOL_IDLE))
        atomic_fetch_sub_explicit(&job->n_helping, 1, memory_order_relaxed);
}

/* Waits until no helper looks at the job any more: at most one task's time. */
static void pool_wait(pool_job *job) {
    int spins = 0;
    while (atomic_load_explicit(&job->n_helping, memory_order_acquire) > 0) {
        pool_relax();
#ifndef _WIN32
        if (++spins >= POOL_SPINS)
            sched_yield(); /* do not starve its thread */
#endif
    }
    (void)spins;
}

/* task(context, i) for every i in [0, n_tasks), by at most n_threads threads; returns when all are done. */
static void pool_run(pool_task task, void *context, Py_ssize_t n_tasks, int n_threads) {
    pool_job job;
    pool_helper *borrowed[POOL_MAX_HELPERS];
    unsigned calls[POOL_MAX_HELPERS];
    int n_borrowed = 0, cursor = 0;
    int limit = atomic_load_explicit(&pool_limit, memory_order_relaxed);
    if (limit < n_threads)
        limit = n_threads; /* asked for by name */
    if (n_threads > n_tasks)
        n_threads = (int)n_tasks;
    job.task = task;
    job.context = context;
    job.n_tasks = n_tasks;
    atomic_init(&job.next, 0);
    atomic_init(&job.n_helping, 0);
    pool_team team = atomic_load_explicit(&pool_borrowed_team, memory_order_acquire);
    if (team != NULL) {
        team(pool_work_in_team, &job, (unsigned)n_threads, 0);
        return;
    }
    atomic_fetch_add(&pool_running, 1);
    while (n_borrowed < n_threads - 1 && n_borrowed < POOL_MAX_HELPERS &&
           atomic_load_explicit(&pool_running, memory_order_relaxed) < limit) {
        pool_helper *helper = pool_borrow(&job, &cursor, &calls[n_borrowed]);
        if (helper == NULL)
            break;
        atomic_fetch_add(&pool_running, 1);
        borrowed[n_borrowed++] = helper;
    }
    pool_work(&job);
    for (int i = 0; i < n_borrowed; ++i)
        pool_take_back(&job, borrowed[i], calls[i]);
    pool_wait(&job);
    atomic_fetch_sub(&pool_running, 1 + n_borrowed);
}

#ifndef _WIN32
static void pool_forget(void) {
    memset(pool_helpers, 0, sizeof pool_helpers); /* the parent's threads and locks are not ours */
    atomic_store(&pool_running, 0);
    atomic_store(&pool_borrowed_team, (pool_team)NULL); /* nor are its teams */
}
#endif

static void pool_use_team(Py_ssize_t address) { atomic_store(&pool_borrowed_team, (pool_team)address); }
static int pool_has_team(void) { return atomic_load(&pool_borrowed_team) != NULL; }

static void pool_start(void) {
#ifndef _WIN32
    pthread_atfork(NULL, NULL, pool_forget);
#endif
}

#endif
