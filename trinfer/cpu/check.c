/* The sanitizer behind TRINFER_CPU_CHECK=1: bounds, races between programs, and what was never written.

   Programs of a checked launch run one after the other. Shadow memory holds, for each element of the arguments'
   memory, which program read, wrote and atomically updated it last and when. Two accesses of different programs to one
   element, at least one of them a change and not both atomic, are a race unless acquire-release atomics order them: q
   may read or overwrite what p touched before p's atomic on A if q did one on A afterwards. Time counts atomics;
   `seen[p]` is the time up to which the running program knows what p did, and every atomic address keeps what its last
   visitors knew. Large shadow memory is reserved, not used: the system makes a page of it when a kernel touches the
   element behind it, so that a tensor may be larger than the memory of the machine. */
#define _DEFAULT_SOURCE
#include "check.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

enum { OUTSIDE, BETWEEN, RACE };
enum { READ, WRITE, UPDATE };
enum { NOBODY = 0, MANY = -1, MOST_FAULTS = 32, MOST_DIMS = 8, POOL = 64 << 20 };

/* who: number of the program + 1, NOBODY or MANY; site: its number in the table of the kernel. Kept small: an element
   has three, and they are read from memory at each access. */
struct visit { int32_t time, who, site; };
struct element { struct visit read, write, update; };
struct region { char *begin, *end; int64_t granule; struct element* elements; };
/* dims: of a view with gaps, strides in bytes from the largest down; `run` bytes without a gap at the end of them */
struct range { char *begin, *end; int64_t dims, run, size[MOST_DIMS], stride[MOST_DIMS]; };
struct address { const void* place; int64_t* known; struct address* next; };
struct fault { int32_t kind, argument, did, other_did; int64_t program, other, offset; const struct t_site *site, *other_site; };
struct place { int argument; int64_t offset, count; struct element* first; };

static struct region* regions;
static int region_count;
static const struct range* ranges;
static int range_count;
static struct address* addresses;
static const struct t_site* sites;
/* shared_read[p]: when p last read an element that another program reads too */
static int64_t *seen, *shared_read, programs, now, current;
static struct fault faults[MOST_FAULTS];
static int64_t fault_count;
/* kept from launch to launch: new pages cost more than the kernel that is checked */
static char* pool;
static int64_t pooled;
static char junk[64] __attribute__((aligned(64)));

static int64_t shadow_bytes(const struct region* r) {
  return sizeof(struct element) * ((r->end - r->begin + r->granule - 1) / r->granule + 1);
}

/* Addresses of zeros, which become memory when they are touched; NULL if there are none left. */
static void* reserve(int64_t bytes) {
  void* p = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? 0 : p;
}

/* Zeros for one launch, from the pool if they fit there. */
static void* shadow_of(const struct region* r) {
  int64_t bytes = shadow_bytes(r);
  if (!pool) pool = reserve(POOL);
  if (!pool || pooled + bytes > POOL) return reserve(bytes);
  pooled += bytes;
  return memset(pool + pooled - bytes, 0, bytes);
}

static int is_pooled(const void* p) { return pool && (const char*)p >= pool && (const char*)p < pool + POOL; }

/* 0 if the shadow of the arguments finds no addresses */
int t_check_begin(const struct range* args, int count, const struct region* memory, int regions_in, int64_t grid) {
  ranges = args; range_count = count; region_count = 0; programs = grid;
  regions = malloc(sizeof *regions * (regions_in ? regions_in : 1));
  seen = calloc(grid ? grid : 1, sizeof *seen);
  shared_read = calloc(grid ? grid : 1, sizeof *shared_read);
  now = 1; fault_count = 0;
  for (int i = 0; i < regions_in; i++) {
    struct region* r = &regions[i];
    *r = memory[i];
    r->elements = shadow_of(r);
    if (!r->elements) return 0;
    region_count++;
  }
  return 1;
}

/* Copies at most `room` faults out, frees everything; gives how many places were at fault. */
int64_t t_check_end(struct fault* out, int room) {
  memcpy(out, faults, sizeof *out * (fault_count < room ? fault_count : room));
  for (int i = 0; i < region_count; i++)
    if (!is_pooled(regions[i].elements)) munmap(regions[i].elements, shadow_bytes(&regions[i]));
  pooled = 0;
  free(regions); free(seen); free(shared_read);
  while (addresses) { struct address* next = addresses->next; free(addresses->known); free(addresses); addresses = next; }
  return fault_count;
}

void t_check_program(int64_t program) { current = program; memset(seen, 0, sizeof *seen * programs); }

/* Keeps the first fault of each kind at each site. */
static void report(struct fault f) {
  for (int64_t i = 0; i < fault_count; i++)
    if (faults[i].kind == f.kind && faults[i].site == f.site && faults[i].other_did == f.other_did) return;
  f.program = current;
  if (fault_count < MOST_FAULTS) faults[fault_count++] = f;
}

/* True if `bytes` at an offset belong to an element of the view, not to a gap between its rows. */
static int is_element(const struct range* r, int64_t offset, int bytes) {
  if (!r->dims) return 1;
  for (int d = 0; d < r->dims; d++) {
    int64_t i = offset / r->stride[d];
    offset -= (i < r->size[d] ? i : r->size[d] - 1) * r->stride[d];
  }
  return offset + bytes <= r->run;
}

/* Whether a pointer may point to a place; if not, that is reported. `first` is NULL where there is no shadow. */
static int find(const struct t_site* site, const char* p, int did, struct place* found) {
  int closest = -1, kind = OUTSIDE;
  int64_t least = INT64_MAX;
  *found = (struct place){.argument = -1};
  sites = site - site->site;
  for (int k = 0; k < range_count; k++) {
    if (!(site->args >> k & 1)) continue;
    if (p < ranges[k].begin || p + site->bytes > ranges[k].end) {
      int64_t distance = p < ranges[k].begin ? ranges[k].begin - p : p + site->bytes - ranges[k].end;
      if (distance < least) { closest = k; least = distance; kind = OUTSIDE; }
      continue;
    }
    if (!is_element(&ranges[k], p - ranges[k].begin, site->bytes)) { closest = k; least = 0; kind = BETWEEN; continue; }
    found->argument = k; found->offset = p - ranges[k].begin;
    break;
  }
  if (found->argument < 0 && !site->is_anywhere) {
    int64_t offset = closest < 0 ? 0 : p - ranges[closest].begin;
    report((struct fault){.kind = kind, .argument = closest, .did = did, .offset = offset, .site = site});
    return 0;
  }
  for (int i = 0; i < region_count; i++) {
    struct region* r = &regions[i];
    if (p < r->begin || p >= r->end) continue;
    found->count = site->bytes > r->granule ? site->bytes / r->granule : 1;
    found->first = r->elements + (p - r->begin) / r->granule;
  }
  return 1;
}

static int knows_of_all_shared_reads(void) {
  for (int64_t p = 0; p < programs; p++)
    if (p != current && shared_read[p] && seen[p] <= shared_read[p]) return 0;
  return 1;
}

static int is_ordered(const struct visit* v) {
  if (v->who == NOBODY || v->who == current + 1) return 1;
  return v->who == MANY ? knows_of_all_shared_reads() : seen[v->who - 1] > v->time;
}

static void compare(const struct t_site* site, const struct place* at, int did, const struct visit* other, int other_did) {
  if (is_ordered(other)) return;
  report((struct fault){RACE, at->argument, did, other_did, .other = other->who == MANY ? MANY : other->who - 1,
                        .offset = at->offset, .site = site, .other_site = sites + other->site});
}

static struct visit this_visit(const struct t_site* site) { return (struct visit){(int32_t)now, (int32_t)current + 1, site->site}; }

void* t_check_read(const struct t_site* site, const void* p) {
  struct place at;
  if (!find(site, p, READ, &at)) return memset(junk, 0, sizeof junk);
  if (!at.first) return (void*)p;
  for (struct element* e = at.first; e < at.first + at.count; e++) {
    compare(site, &at, READ, &e->write, WRITE);
    compare(site, &at, READ, &e->update, UPDATE);
    if (e->read.who == MANY || !is_ordered(&e->read)) {
      if (e->read.who != MANY) shared_read[e->read.who - 1] = e->read.time > shared_read[e->read.who - 1] ? e->read.time : shared_read[e->read.who - 1];
      shared_read[current] = now;
      e->read = this_visit(site);
      e->read.who = MANY;
    } else {
      e->read = this_visit(site);
    }
  }
  return (void*)p;
}

void* t_check_write(const struct t_site* site, const void* p, const void* value) {
  struct place at;
  if (!find(site, p, WRITE, &at)) return junk;
  if (!at.first) return (void*)p;
  int differs = memcmp(p, value, site->bytes) != 0;
  for (struct element* e = at.first; e < at.first + at.count; e++) {
    if (differs) {
      compare(site, &at, WRITE, &e->read, READ);
      compare(site, &at, WRITE, &e->write, WRITE);
      compare(site, &at, WRITE, &e->update, UPDATE);
    }
    e->write = this_visit(site);
  }
  return (void*)p;
}

static int64_t* known_at(const void* place) {
  struct address* a = addresses;
  while (a && a->place != place) a = a->next;
  if (!a) {
    a = malloc(sizeof *a);
    *a = (struct address){place, calloc(programs, sizeof(int64_t)), addresses};
    addresses = a;
  }
  return a->known;
}

void* t_check_atomic(const struct t_site* site, const void* p, int acquires, int releases) {
  struct place at;
  if (!find(site, p, UPDATE, &at)) return memset(junk, 0, sizeof junk);
  int64_t* known = known_at(p);
  if (acquires)
    for (int64_t q = 0; q < programs; q++) if (known[q] > seen[q]) seen[q] = known[q];
  for (struct element* e = at.first; e && e < at.first + at.count; e++) {
    compare(site, &at, UPDATE, &e->read, READ);
    compare(site, &at, UPDATE, &e->write, WRITE);
    e->update = this_visit(site);
  }
  if (releases) {
    for (int64_t q = 0; q < programs; q++) if (seen[q] > known[q]) known[q] = seen[q];
    known[current] = ++now;
  }
  now++;
  return (void*)p;
}

static int is_written(const char* place) {
  for (int i = 0; i < region_count; i++) {
    if (place < regions[i].begin || place >= regions[i].end) continue;
    const struct element* e = regions[i].elements + (place - regions[i].begin) / regions[i].granule;
    if (e->write.who || e->update.who) return 1;
  }
  return 0;
}

/* How many elements of a view no program wrote or updated; `first` becomes the index of the first. */
int64_t t_check_unwritten(const char* begin, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t* first) {
  int64_t missing = 0, *index = calloc(dims + 1, sizeof *index), d;
  do {
    const char* place = begin;
    for (d = 0; d < dims; d++) place += index[d] * strides[d];
    if (!is_written(place) && !missing++) memcpy(first, index, sizeof *index * dims);
    for (d = dims - 1; d >= 0 && ++index[d] == sizes[d]; d--) index[d] = 0;
  } while (d >= 0);
  free(index);
  return missing;
}
