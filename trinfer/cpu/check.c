/* The sanitizer behind TRINFER_CPU_CHECK=1: bounds, races between programs, and what was never written.

   Programs of a checked launch run one after the other. Shadow memory holds, for each element of the arguments'
   memory, which program wrote and read it last and when. Two accesses of different programs to one element, at
   least one of them a write, are a race unless acquire-release atomics order them: q may read or overwrite what p
   touched before p's atomic on A if q did one on A afterwards. Time counts atomics; `seen[p]` is the time up to which
   the running program knows what p did, and every atomic address keeps what its last visitors knew. */
#include "check.h"
#include <stdlib.h>
#include <string.h>

enum { OUTSIDE, READ_OF_WRITTEN, WRITE_OF_READ, WRITE_OF_WRITTEN };
enum { NOBODY = -1, MANY = -2, MOST_FAULTS = 32 };

struct element { int32_t writer, reader, is_written; int64_t write_time, read_time; const struct t_site *writer_site, *reader_site; };
struct region { char *begin, *end; int64_t granule; struct element* elements; };
struct range { char *begin, *end; };
struct address { const void* place; int64_t* known; struct address* next; };
struct fault { int32_t kind, argument; int64_t program, other, offset; const struct t_site *site, *other_site; };

static struct region* regions;
static int region_count;
static const struct range* ranges;
static int range_count;
static struct address* addresses;
static int64_t *seen, programs, now, current;
static struct fault faults[MOST_FAULTS];
static int64_t fault_count;
static char junk[64] __attribute__((aligned(64)));

void t_check_begin(const struct range* args, int count, const struct region* memory, int regions_in, int64_t grid) {
  ranges = args; range_count = count; region_count = regions_in; programs = grid;
  regions = malloc(sizeof *regions * (regions_in ? regions_in : 1));
  memcpy(regions, memory, sizeof *regions * regions_in);
  for (int i = 0; i < regions_in; i++) {
    int64_t n = (regions[i].end - regions[i].begin + regions[i].granule - 1) / regions[i].granule;
    regions[i].elements = malloc(sizeof(struct element) * (n ? n : 1));
    for (int64_t k = 0; k < n; k++) regions[i].elements[k] = (struct element){.writer = NOBODY, .reader = NOBODY};
  }
  seen = calloc(grid ? grid : 1, sizeof *seen);
  now = 1; fault_count = 0;
}

/* Copies at most `room` faults out, frees everything; gives how many places were at fault. */
int64_t t_check_end(struct fault* out, int room) {
  memcpy(out, faults, sizeof *out * (fault_count < room ? fault_count : room));
  for (int i = 0; i < region_count; i++) free(regions[i].elements);
  free(regions); free(seen);
  while (addresses) { struct address* next = addresses->next; free(addresses->known); free(addresses); addresses = next; }
  return fault_count;
}

void t_check_program(int64_t program) { current = program; memset(seen, 0, sizeof *seen * programs); }

/* Keeps the first fault of each kind at each site. */
static void report(int kind, const struct t_site* site, int argument, int64_t offset, int64_t other, const struct t_site* at) {
  for (int64_t i = 0; i < fault_count; i++)
    if (faults[i].kind == kind && faults[i].site == site) return;
  if (fault_count < MOST_FAULTS) faults[fault_count++] = (struct fault){kind, argument, current, other, offset, site, at};
}

/* The element behind a place, or NULL (reported) if it is outside of every argument that the pointer may point into. */
static struct element* find(const struct t_site* site, const char* place, int* argument, int64_t* offset, int64_t* count) {
  int first = -1;
  for (int k = 0; k < range_count; k++) {
    if (!(site->args >> k & 1)) continue;
    if (first < 0) first = k;
    if (place < ranges[k].begin || place + site->bytes > ranges[k].end) continue;
    *argument = k; *offset = place - ranges[k].begin;
    for (int i = 0; i < region_count; i++)
      if (place >= regions[i].begin && place < regions[i].end) {
        *count = site->bytes > regions[i].granule ? site->bytes / regions[i].granule : 1;
        return regions[i].elements + (place - regions[i].begin) / regions[i].granule;
      }
  }
  report(OUTSIDE, site, first, first < 0 ? 0 : place - ranges[first].begin, NOBODY, 0);
  return 0;
}

static int is_ordered(int32_t program, int64_t time) {
  return program == current || (program >= 0 && seen[program] > time);
}

void* t_check_read(const struct t_site* site, const void* place) {
  int argument; int64_t offset, count;
  struct element* e = find(site, place, &argument, &offset, &count);
  if (!e) return memset(junk, 0, sizeof junk);
  for (int64_t k = 0; k < count; k++, e++) {
    if (e->writer != NOBODY && !is_ordered(e->writer, e->write_time))
      report(READ_OF_WRITTEN, site, argument, offset, e->writer, e->writer_site);
    e->reader = e->reader == NOBODY || e->reader == current || is_ordered(e->reader, e->read_time) ? (int32_t)current : MANY;
    e->read_time = now; e->reader_site = site;
  }
  return (void*)place;
}

void* t_check_write(const struct t_site* site, const void* place, const void* value) {
  int argument; int64_t offset, count;
  struct element* e = find(site, place, &argument, &offset, &count);
  if (!e) return junk;
  int differs = memcmp(place, value, site->bytes) != 0;
  for (int64_t k = 0; k < count; k++, e++) {
    if (differs && e->reader != NOBODY && !is_ordered(e->reader, e->read_time))
      report(WRITE_OF_READ, site, argument, offset, e->reader, e->reader_site);
    if (differs && e->writer != NOBODY && !is_ordered(e->writer, e->write_time))
      report(WRITE_OF_WRITTEN, site, argument, offset, e->writer, e->writer_site);
    e->writer = (int32_t)current; e->write_time = now; e->writer_site = site; e->is_written = 1;
  }
  return (void*)place;
}

void* t_check_atomic(const struct t_site* site, const void* place, int acquires, int releases) {
  int argument; int64_t offset, count;
  struct element* e = find(site, place, &argument, &offset, &count);
  if (!e) return memset(junk, 0, sizeof junk);
  for (int64_t k = 0; k < count; k++, e++) {
    if (e->writer != NOBODY && !is_ordered(e->writer, e->write_time))
      report(READ_OF_WRITTEN, site, argument, offset, e->writer, e->writer_site);
    e->is_written = 1;
  }
  struct address* a = addresses;
  while (a && a->place != place) a = a->next;
  if (!a) {
    a = malloc(sizeof *a);
    *a = (struct address){place, calloc(programs, sizeof(int64_t)), addresses};
    addresses = a;
  }
  if (acquires)
    for (int64_t p = 0; p < programs; p++) if (a->known[p] > seen[p]) seen[p] = a->known[p];
  if (releases) {
    for (int64_t p = 0; p < programs; p++) if (seen[p] > a->known[p]) a->known[p] = seen[p];
    a->known[current] = ++now;
  }
  now++;
  return (void*)place;
}

/* written[k] = 1 if some program wrote (or updated atomically) the element at begin + k * bytes of a region */
void t_check_written(const char* begin, int64_t n, int64_t bytes, uint8_t* written) {
  for (int64_t k = 0; k < n; k++) {
    const char* place = begin + k * bytes;
    for (int i = 0; i < region_count; i++)
      if (place >= regions[i].begin && place < regions[i].end)
        written[k] = regions[i].elements[(place - regions[i].begin) / regions[i].granule].is_written;
  }
}
