/* Runs the programs of launches over the threads of torch's OpenMP pool. */
#include <sched.h>
#include <stdint.h>
#include <time.h>

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
  /* of each launch, if asked for */
  double* us;
  /* programs of all launches so far */
  int64_t finished;
};

static void pause_briefly(void)
{
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* the other threads finish within microseconds, or have lost their core: then ours is offered to whom it may help */
static void await(const int64_t* finished, int64_t due)
{
  int spins = 0;
  while (__atomic_load_n(finished, __ATOMIC_ACQUIRE) < due) {
    if (spins < 2000) {
      spins++;
      pause_briefly();
    } else
      sched_yield();
  }
}

static double now_us(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

/* one thread's share of every launch; the count of finished programs is the barrier: no thread goes on before all
   programs of a launch are done, and a thread without a share holds up no other */
static void work_through(void* data)
{
  struct replayed* r = data;
  const struct task* const* tasks = r->tasks;
  int64_t count = r->count, threads = omp_get_num_threads(), thread = omp_get_thread_num(), due = 0;
  double* us = thread == 0 ? r->us : 0;
  double before = us ? now_us() : 0;
  for (int64_t k = 0; k < count; k++) {
    const struct task* t = tasks[k];
    int64_t begin = t->count * thread / threads, end = t->count * (thread + 1) / threads;
    if (begin < end) {
      t->run(t->args, begin, end);
      __atomic_fetch_add(&r->finished, end - begin, __ATOMIC_RELEASE);
    }
    due += t->count;
    await(&r->finished, due);
    if (us) {
      double after = now_us();
      us[k] = after - before;
      before = after;
    }
  }
}

void replay(const struct task* const* tasks, int64_t count, int threads, double* us)
{
  struct replayed r = {tasks, count, us, 0};
  GOMP_parallel(work_through, &r, (unsigned)threads, 0);
}
