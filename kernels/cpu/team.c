// The threads of team.h.
//
// An OpenMP region ends when every thread of the team has passed through it. On a busy machine a thread that waits for its time slice then stops all
// others for milliseconds, two hundred times a token. Here the caller starts at once, threads that are awake join it, and late ones find nothing left to
// do. Idle threads poll for work for some tens of microseconds, as long as the gaps inside a step, and then sleep.
#ifndef SCALAR_BF16  // compiled only once
#include "team.h"

#include "program.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define LOOKS 4000       // polls for new work before a thread sleeps, with a pause of 10 to 40 ns each
#define CACHE_LINE 128   // two lines are fetched together

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

typedef struct {
    _Alignas(CACHE_LINE) atomic_long next;
    long end;
} range;

static range ranges[MOST_THREADS];  // for each thread the pieces that it takes first

// The caller writes it while `entered` is closed and empty, so a thread that has entered may read it.
static struct {
    part_of_job part;
    const void *what;
    int threads;
} job;

#define OPEN (1u << 16)
_Alignas(CACHE_LINE) static atomic_uint entered;     // OPEN, plus the number of threads inside besides the caller
_Alignas(CACHE_LINE) static atomic_uint num_jobs;    // idle threads poll this number
static atomic_int sleeping;
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER, calling = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t alarm_bell = PTHREAD_COND_INITIALIZER;
static int num_threads = 1;  // number of started threads, the caller included; changed under the lock `calling`

void wait_a_little(int look) {
    if (look < LOOKS) PAUSE();
    else sched_yield();
}

static int enter(void) {
    unsigned seen = atomic_load(&entered);
    while (seen & OPEN)
        if (atomic_compare_exchange_weak(&entered, &seen, seen + 1)) return 1;
    return 0;
}

static unsigned wait_for_job(unsigned last) {
    unsigned now;
    for (int look = 0; look < LOOKS; look++) {
        if ((now = atomic_load(&num_jobs)) != last) return now;
        PAUSE();
    }
    pthread_mutex_lock(&bed);
    atomic_fetch_add(&sleeping, 1);
    while ((now = atomic_load(&num_jobs)) == last) pthread_cond_wait(&alarm_bell, &bed);
    atomic_fetch_sub(&sleeping, 1);
    pthread_mutex_unlock(&bed);
    return now;
}

static void *work_for_ever(void *id) {
    for (unsigned last = 0;;) {
        last = wait_for_job(last);
        if (!enter()) continue;
        if ((int)(long)id < job.threads) job.part(job.what, (int)(long)id);
        atomic_fetch_sub(&entered, 1);
    }
    return NULL;
}

// Runs in a child of fork, which has none of its parent's threads.
static void forget_threads(void) {
    num_threads = 1;
    atomic_store(&entered, 0);
    atomic_store(&sleeping, 0);
    pthread_mutex_init(&bed, NULL);
    pthread_mutex_init(&calling, NULL);
    pthread_cond_init(&alarm_bell, NULL);
}

static void start_threads(int threads) {
    if (num_threads == 1 && threads > 1) {
        static int registered;
        if (!registered) pthread_atfork(NULL, NULL, forget_threads);
        registered = 1;
    }
    while (num_threads < threads) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work_for_ever, (void *)(long)num_threads)) return;  // fewer threads do the work
        pthread_detach(thread);
        num_threads++;
    }
}

int get_team(int threads) {
    if (pthread_mutex_trylock(&calling)) return 0;
    start_threads(threads);
    return 1;
}

void run_with_team(part_of_job part, const void *what, int threads) {
    job.part = part, job.what = what, job.threads = threads;
    atomic_store(&entered, OPEN);
    atomic_fetch_add(&num_jobs, 1);
    if (atomic_load(&sleeping)) {
        pthread_mutex_lock(&bed);
        pthread_cond_broadcast(&alarm_bell);
        pthread_mutex_unlock(&bed);
    }
    part(what, 0);
    atomic_fetch_and(&entered, ~OPEN);
    for (int look = 0; atomic_load(&entered); look++) wait_a_little(look);  // threads still inside are computing their last piece
    pthread_mutex_unlock(&calling);
}

typedef struct {
    piece_of_work work;
    const void *arguments;
    int threads;
} shared;

static void take_pieces(const void *what, int id) {
    const shared *s = what;
    for (int i = 0; i < s->threads; i++) {
        range *r = &ranges[(id + i) % s->threads];
        for (long piece; atomic_load_explicit(&r->next, memory_order_relaxed) < r->end && (piece = atomic_fetch_add(&r->next, 1)) < r->end;)
            s->work(s->arguments, piece);
    }
}

void share_reading(piece_of_work work, const void *arguments, size_t size, reading reads, long pieces, int threads) {
    if (recorded) record_step(work, arguments, size, reads, pieces);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > pieces) threads = (int)pieces;
    // If another thread of this process has the team, this thread works alone.
    if (threads <= 1 || !get_team(threads)) {
        for (long piece = 0; piece < pieces; piece++) work(arguments, piece);
        return;
    }
    for (int i = 0; i < threads; i++) {
        atomic_store_explicit(&ranges[i].next, pieces * i / threads, memory_order_relaxed);
        ranges[i].end = pieces * (i + 1) / threads;
    }
    const shared s = {work, arguments, threads};
    run_with_team(take_pieces, &s, threads);
}
#endif
