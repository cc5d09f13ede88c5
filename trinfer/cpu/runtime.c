/* Runs the programs of launches over the threads of torch's OpenMP pool. */
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef void (*programs)(const void* args, int64_t begin, int64_t end);

/* the entry of GNU's OpenMP library, which LLVM's has too: called by name, no compiler brings a pool of its own */
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads(void);
int omp_get_thread_num(void);

/* what the launcher packs: the emitted struct args follows at once */
struct task {
  programs run;
  int64_t count, threads;
  char args[];
};

struct launched {
  const struct task* task;
  int64_t share, next;
};

static void work(void* data)
{
  struct launched* l = data;
  const struct task* t = l->task;
  int64_t begin;
  while ((begin = __atomic_fetch_add(&l->next, l->share, __ATOMIC_RELAXED)) < t->count)
    t->run(t->args, begin, begin + l->share < t->count ? begin + l->share : t->count);
}

/* shares of the grid are handed out on demand, eight a thread, so that a disturbed core does not hold up the others */
void launch(const struct task* t)
{
  if (t->count <= 1 || t->threads <= 1) {
    t->run(t->args, 0, t->count);
    return;
  }
  int64_t share = t->count / (8 * t->threads);
  struct launched l = {t, share < 1 ? 1 : share, 0};
  GOMP_parallel(work, &l, (unsigned)t->threads, 0);
}

struct replayed {
  const struct task* const* tasks;
  int64_t count;
  /* microseconds of each launch, if asked for, and when the launch before was done */
  double *us, before;
  /* shares of all launches, numbered through: the next that nobody has taken */
  int64_t next;
  /* programs that are done, of all launches so far */
  int64_t finished;
  /* launches that are done, and threads that sleep until this changes */
  int done, sleepers;
};

static void pause_briefly(void)
{
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* the others finish within microseconds, or have lost their core; then ours has to fall idle, so that the system
   moves them here: yielding it again and again is ten times slower beside two busy processes */
static void await(struct replayed* r, int launches)
{
  int done;
  for (int spins = 0; spins < 2000; spins++) {
    if (__atomic_load_n(&r->done, __ATOMIC_ACQUIRE) >= launches)
      return;
    pause_briefly();
  }
  __atomic_fetch_add(&r->sleepers, 1, __ATOMIC_SEQ_CST);
  while ((done = __atomic_load_n(&r->done, __ATOMIC_SEQ_CST)) < launches)
    syscall(SYS_futex, &r->done, FUTEX_WAIT_PRIVATE, done, 0, 0, 0);
  __atomic_fetch_sub(&r->sleepers, 1, __ATOMIC_RELAXED);
}

static double now_us(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static void announce(struct replayed* r, int launches)
{
  if (r->us) {
    double now = now_us();
    r->us[launches - 1] = now - r->before;
    r->before = now;
  }
  __atomic_store_n(&r->done, launches, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&r->sleepers, __ATOMIC_SEQ_CST) > 0)
    syscall(SYS_futex, &r->done, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

/* takes shares on demand, two a thread and launch, and runs each once the launches before are done. A thread that
   loses its core between two shares holds up no other, which a barrier for all threads would do */
static void work_through(void* data)
{
  struct replayed* r = data;
  int64_t most = 2 * omp_get_num_threads();
  /* of the launches before k: their shares and their programs */
  int64_t shares_before = 0, programs_before = 0;
  for (int k = 0;;) {
    int64_t share = __atomic_fetch_add(&r->next, 1, __ATOMIC_RELAXED) - shares_before, shares = 0;
    for (; k < r->count; k++) {
      shares = r->tasks[k]->count < most ? r->tasks[k]->count : most;
      if (share < shares)
        break;
      share -= shares;
      shares_before += shares;
      programs_before += r->tasks[k]->count;
    }
    if (k == r->count)
      return;
    const struct task* t = r->tasks[k];
    int64_t begin = t->count * share / shares, end = t->count * (share + 1) / shares;
    await(r, k);
    t->run(t->args, begin, end);
    if (__atomic_add_fetch(&r->finished, end - begin, __ATOMIC_ACQ_REL) == programs_before + t->count)
      announce(r, k + 1);
  }
}

/* all tasks in order, each after the one before is done */
void replay(const struct task* const* tasks, int64_t count, int threads, double* us)
{
  struct replayed r = {.tasks = tasks, .count = count, .us = us, .before = us ? now_us() : 0};
  GOMP_parallel(work_through, &r, (unsigned)threads, 0);
}
