/* Runs the programs of a launch over the threads of torch's OpenMP pool. */
#include <stdint.h>

typedef void (*programs)(const void* args, int64_t begin, int64_t end);

/* the entry of GNU's OpenMP library, which LLVM's has too: called by name, no compiler brings a pool of its own */
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);

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
