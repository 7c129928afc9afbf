/* Where torch's large CPU tensors lie: in memory that processes of this host can map.
 *
 * torch gets the memory of every CPU tensor in one library, libc10, by posix_memalign and free. Here these two calls
 * of that library, and of no other, are pointed at `take` and `give_back` below. Tensors of some size made by a thread
 * between shared_heap_enter and shared_heap_leave come from one shared mapping (a memfd made by shm.py); everything else
 * goes to the C library as before. What libc10 does not import this way (another allocator was built in) cannot be
 * taken over: shared_heap_install says so, and nothing has changed.
 *
 * Blocks are kept in a list by address, free neighbours joined, the best fitting free block taken. The same steps
 * therefore find the same blocks again. What is known of blocks lies outside the shared memory: whoever maps that
 * cannot confuse us.
 *
 * fork() would give the child the same memory, not a copy of it, and two processes would write over each other.
 * The child therefore copies what is in use before it does anything else; the parent waits for that.
 *
 * Plain C without Python.h or torch's headers, loaded by shared_heap.py through ctypes. Linux, ELF, 64 bit.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if __SIZEOF_POINTER__ != 8 || !(defined(__x86_64__) || defined(__aarch64__))
#error "written for 64 bit x86 and ARM"
#endif
#ifdef __x86_64__
#define IS_IMPORT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#else
#define IS_IMPORT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#endif

enum {
  ALIGNMENT = 64,    /* torch's, and what messages want */
  STAGGER = 320,     /* between blocks: large tensors shall not all begin at the same place of a page */
  BUCKETS = 1 << 12,
  LOOKED_AT = 1024,  /* free blocks at most, before the best of them is taken */
  COPY_LIMIT_MS = 60000,
};

enum { NO_MEMORY = 1, NO_FREE = 2, NO_POSIX_MEMALIGN = 3, IS_CHILD = 4 }; /* why it cannot be installed */

typedef struct block {
  size_t begin, size; /* offset into the heap, bytes */
  struct block *before, *after;        /* neighbours by address */
  struct block *free_before, *free_after; /* among the free ones */
  struct block *same_bucket;
  int is_free;
  int is_clean; /* free, and the kernel has its pages back */
} block;

static struct {
  char *base;
  size_t size, least, kept_limit;
  int fd;
  block *lowest;    /* by address: the first block */
  block first_free; /* head of the list of free blocks */
  block *buckets[BUCKETS];
  size_t used, kept; /* bytes in use; bytes free with their pages */
  size_t peak, peak_before; /* the most in use, in this period and in the one before */
  time_t period_s, since;   /* how long a period is; when this one began */
  pthread_mutex_t lock;
} heap = {.lock = PTHREAD_MUTEX_INITIALIZER};

static volatile int is_open;       /* new tensors may come from here */
static __thread int is_wanted;     /* by this thread, now */
static int copied[2] = {-1, -1};   /* a pipe by which a forked child says that it has its copy */
static int handles_fork;

static block **bucket_of(size_t begin) { return &heap.buckets[(begin / ALIGNMENT) % BUCKETS]; }

static void list_free(block *one) {
  one->is_free = 1;
  one->free_before = &heap.first_free;
  one->free_after = heap.first_free.free_after;
  one->free_after->free_before = one;
  heap.first_free.free_after = one;
  if (!one->is_clean) heap.kept += one->size;
}

static void unlist_free(block *one) {
  one->is_free = 0;
  one->free_before->free_after = one->free_after;
  one->free_after->free_before = one->free_before;
  if (!one->is_clean) heap.kept -= one->size;
}

/* The best fitting free block that has its pages; else the best without; the lower one of two. */
static block *find(size_t size) {
  block *best = NULL;
  int looked_at = 0;
  for (block *one = heap.first_free.free_after; one != &heap.first_free; one = one->free_after) {
    if (++looked_at > LOOKED_AT) break;
    if (one->size < size) continue;
    if (best == NULL || one->is_clean < best->is_clean ||
        (one->is_clean == best->is_clean &&
         (one->size < best->size || (one->size == best->size && one->begin < best->begin))))
      best = one;
  }
  return best;
}

/* Gives the whole pages of a free block back to the kernel. */
static void clean(block *one) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  size_t begin = (one->begin + page - 1) / page * page;
  size_t end = (one->begin + one->size) / page * page;
  if (one->is_clean) return;
  if (begin < end && fallocate(heap.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)begin,
                               (off_t)(end - begin)) != 0)
    return; /* it keeps them */
  unlist_free(one);
  one->is_clean = 1;
  list_free(one);
}

/* Joins a free block with the one after it; only of the same kind, so that kept pages are found first. */
static void join(block *one, block *next) {
  if (one == NULL || next == NULL || !one->is_free || !next->is_free ||
      one->is_clean != next->is_clean)
    return;
  unlist_free(one);
  unlist_free(next);
  one->size += next->size;
  one->after = next->after;
  if (one->after != NULL) one->after->before = one;
  free(next);
  list_free(one);
}

/* Everything that is free: its pages back to the kernel, neighbours joined. */
static void clean_all(void) {
  for (block *one = heap.lowest; one != NULL; one = one->after)
    if (one->is_free) clean(one);
  for (block *one = heap.lowest; one != NULL; one = one->after)
    while (one->is_free && one->after != NULL && one->after->is_free &&
           one->after->is_clean == one->is_clean)
      join(one, one->after);
}

/* How much may stay free with its pages: a little, or all that was in use lately. Steps that need a gigabyte would
 * else fetch it from the kernel, page by page, every time. */
static size_t kept_limit(void) {
  size_t peak = heap.peak > heap.peak_before ? heap.peak : heap.peak_before;
  return peak > heap.used + heap.kept_limit ? peak - heap.used : heap.kept_limit;
}

/* Begins a new period if it is time: what nobody has needed since the last but one is the kernel's again. */
static void note_time(void) {
  struct timespec now;
  if (clock_gettime(CLOCK_MONOTONIC_COARSE, &now) != 0 || now.tv_sec - heap.since < heap.period_s)
    return;
  heap.since = now.tv_sec;
  heap.peak_before = heap.peak;
  heap.peak = heap.used;
  for (block *one = heap.lowest; one != NULL && heap.kept > kept_limit(); one = one->after)
    if (one->is_free) clean(one);
}

static char *take_block(size_t size) {
  size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + STAGGER;
  block *found = find(size);
  if (found == NULL) { /* enough may be free, in pieces of both kinds */
    clean_all();
    found = find(size);
  }
  if (found == NULL) return NULL;
  unlist_free(found);
  if (found->size - size >= heap.least) { /* the rest stays free */
    block *rest = calloc(1, sizeof *rest);
    if (rest != NULL) {
      rest->begin = found->begin + size;
      rest->size = found->size - size;
      rest->is_clean = found->is_clean;
      rest->before = found;
      rest->after = found->after;
      if (rest->after != NULL) rest->after->before = rest;
      found->after = rest;
      found->size = size;
      list_free(rest);
    }
  }
  found->is_clean = 0;
  found->same_bucket = *bucket_of(found->begin);
  *bucket_of(found->begin) = found;
  heap.used += found->size;
  if (heap.used > heap.peak) heap.peak = heap.used;
  return heap.base + found->begin;
}

static void give_back_block(char *memory) {
  size_t begin = (size_t)(memory - heap.base);
  block **place = bucket_of(begin);
  while (*place != NULL && (*place)->begin != begin) place = &(*place)->same_bucket;
  block *one = *place;
  if (one == NULL) return; /* not the beginning of a block: nothing of ours */
  *place = one->same_bucket;
  heap.used -= one->size;
  list_free(one);
  note_time();
  if (heap.kept > kept_limit()) clean(one);
  block *before = one->before;
  join(one, one->after);
  join(before, one);
}

static int is_ours(const void *memory) {
  return heap.base != NULL && (const char *)memory >= heap.base &&
         (const char *)memory < heap.base + heap.size;
}

/* -- what libc10 calls ---------------------------------------------------------------------------- */

static int take(void **memory, size_t alignment, size_t size) {
  if (is_wanted && is_open && size >= heap.least && alignment <= ALIGNMENT) {
    pthread_mutex_lock(&heap.lock);
    char *found = is_open ? take_block(size) : NULL;
    pthread_mutex_unlock(&heap.lock);
    if (found != NULL) {
      *memory = found;
      return 0;
    }
  }
  return posix_memalign(memory, alignment, size);
}

static void give_back(void *memory) {
  if (!is_ours(memory)) {
    free(memory);
  } else if (is_open) { /* in a forked child it was a copy, and stays */
    pthread_mutex_lock(&heap.lock);
    give_back_block(memory);
    pthread_mutex_unlock(&heap.lock);
  }
}

/* -- fork ----------------------------------------------------------------------------------------- */

/* The lock is taken whether the heap is open or not: who opens it meanwhile waits. */
static void before_fork(void) {
  pthread_mutex_lock(&heap.lock);
  if (!is_open || heap.used == 0 || pipe2(copied, O_CLOEXEC) != 0) copied[0] = copied[1] = -1;
}

static void after_fork_in_parent(void) {
  if (copied[0] >= 0) {
    struct pollfd ready = {.fd = copied[0], .events = POLLIN};
    close(copied[1]);
    while (poll(&ready, 1, COPY_LIMIT_MS) < 0 && errno == EINTR) {
    }
    close(copied[0]);
  }
  pthread_mutex_unlock(&heap.lock);
}

static void after_fork_in_child(void) {
  pthread_mutex_unlock(&heap.lock);
  if (!is_open) return;
  is_open = 0;
  size_t end = 0, page = (size_t)sysconf(_SC_PAGESIZE);
  for (block *one = heap.lowest; one != NULL; one = one->after)
    if (!one->is_free) end = (one->begin + one->size + page - 1) / page * page;
  if (end > 0) {
    char *copy = mmap(NULL, end, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (copy == MAP_FAILED) goto failed;
    for (block *one = heap.lowest; one != NULL; one = one->after)
      if (!one->is_free) memcpy(copy + one->begin, heap.base + one->begin, one->size);
    if (mremap(copy, end, end, MREMAP_MAYMOVE | MREMAP_FIXED, heap.base) == MAP_FAILED) goto failed;
  }
  if (copied[0] >= 0) {
    close(copied[0]);
    close(copied[1]);
  }
  return;
failed:;
  static const char why[] = "stratagem: no memory to copy a worker's tensors into a forked process\n";
  if (write(2, why, sizeof why - 1) < 0) _exit(71);
  _exit(70);
}

/* -- taking over ---------------------------------------------------------------------------------- */

typedef struct {
  const char *library, *symbol;
  void *now;
  int replaced;
} import;

static void replace(const struct dl_phdr_info *info, const ElfW(Rela) *table, size_t bytes,
                    const ElfW(Sym) *symbols, const char *names, import *wanted) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  for (const ElfW(Rela) *one = table; bytes >= sizeof *one; one++, bytes -= sizeof *one) {
    if (!IS_IMPORT(ELF64_R_TYPE(one->r_info))) continue;
    if (strcmp(names + symbols[ELF64_R_SYM(one->r_info)].st_name, wanted->symbol) != 0) continue;
    void **place = (void **)(info->dlpi_addr + one->r_offset);
    char *start = (char *)((uintptr_t)place / page * page);
    /* Writable afterwards, too: the rest of the page may still be bound lazily. */
    if (mprotect(start, page, PROT_READ | PROT_WRITE) != 0) continue;
    *place = wanted->now;
    wanted->replaced++;
  }
}

static int look_at_library(struct dl_phdr_info *info, size_t bytes, void *argument) {
  import *wanted = argument;
  (void)bytes;
  const char *name = strrchr(info->dlpi_name, '/');
  if (strcmp(name != NULL ? name + 1 : info->dlpi_name, wanted->library) != 0) return 0;
  const ElfW(Dyn) *dynamic = NULL;
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
      dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
  if (dynamic == NULL) return 1;
  const ElfW(Sym) *symbols = NULL;
  const char *names = NULL;
  const ElfW(Rela) *tables[2] = {NULL, NULL};
  size_t sizes[2] = {0, 0};
  for (; dynamic->d_tag != DT_NULL; dynamic++) {
    /* glibc has turned these into addresses; other loaders leave offsets. */
    uintptr_t at = dynamic->d_un.d_ptr;
    if (at < info->dlpi_addr) at += info->dlpi_addr;
    switch (dynamic->d_tag) {
      case DT_SYMTAB: symbols = (const ElfW(Sym) *)at; break;
      case DT_STRTAB: names = (const char *)at; break;
      case DT_JMPREL: tables[0] = (const ElfW(Rela) *)at; break;
      case DT_PLTRELSZ: sizes[0] = dynamic->d_un.d_val; break;
      case DT_RELA: tables[1] = (const ElfW(Rela) *)at; break;
      case DT_RELASZ: sizes[1] = dynamic->d_un.d_val; break;
    }
  }
  if (symbols == NULL || names == NULL) return 1;
  for (int i = 0; i < 2; i++)
    if (tables[i] != NULL) replace(info, tables[i], sizes[i], symbols, names, wanted);
  return 1;
}

static int import_instead(const char *library, const char *symbol, void *now) {
  import wanted = {.library = library, .symbol = symbol, .now = now};
  dl_iterate_phdr(look_at_library, &wanted);
  return wanted.replaced;
}

/* -- the interface of shared_heap.py -------------------------------------------------------------- */

/* Tensors of `library` of at least `least` bytes may lie in the memory of `fd` from now on, but for its first `head`
 * bytes. Up to `kept_limit` free bytes keep their pages, and so does what was in use within the last `period_s`. There
 * must be no other heap. 0, or the reason why nothing has changed. */
int shared_heap_install(const char *library, int fd, size_t size, size_t head, size_t least,
                        size_t kept_limit, size_t period_s) {
  if (heap.base != NULL) return IS_CHILD; /* forked: its parent's tensors lie at these addresses */
  block *all = calloc(1, sizeof *all);
  int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  char *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  int missing = 0;
  if (all == NULL || own < 0 || base == MAP_FAILED) missing = NO_MEMORY;
  /* Who gives back first, then who takes; until the end of this both do as before. */
  else if (import_instead(library, "free", (void *)give_back) == 0) missing = NO_FREE;
  else if (import_instead(library, "posix_memalign", (void *)take) == 0) missing = NO_POSIX_MEMALIGN;
  else if (!handles_fork && pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child))
    missing = NO_MEMORY;
  else handles_fork = 1; /* for good */
  if (missing) {
    if (base != MAP_FAILED) munmap(base, size);
    if (own >= 0) close(own);
    free(all);
    return missing;
  }
  pthread_mutex_lock(&heap.lock);
  heap.base = base;
  heap.size = size;
  heap.least = least;
  heap.kept_limit = kept_limit;
  heap.period_s = (time_t)period_s;
  heap.peak = heap.peak_before = 0;
  heap.fd = own;
  heap.first_free.free_before = heap.first_free.free_after = &heap.first_free;
  heap.lowest = all;
  all->begin = head;
  all->size = size - head;
  all->is_clean = 1;
  list_free(all);
  is_open = 1;
  pthread_mutex_unlock(&heap.lock);
  return 0;
}

/* Undoes it, if no tensor lies there any more: 1. Else nothing has changed: 0. */
int shared_heap_close(void) {
  pthread_mutex_lock(&heap.lock);
  int closes = is_open && heap.used == 0;
  if (closes) {
    is_open = 0;
    munmap(heap.base, heap.size);
    heap.base = NULL;
    close(heap.fd);
    while (heap.lowest != NULL) {
      block *next = heap.lowest->after;
      free(heap.lowest);
      heap.lowest = next;
    }
    heap.kept = 0;
  }
  pthread_mutex_unlock(&heap.lock);
  return closes;
}

/* Tensors this thread makes from now on may lie there; until it says otherwise. */
void shared_heap_enter(void) { is_wanted = 1; }

void shared_heap_leave(void) { is_wanted = 0; }

int shared_heap_is_entered(void) { return is_wanted; }

char *shared_heap_base(void) { return is_open ? heap.base : NULL; }

size_t shared_heap_used(void) { return heap.used; }

size_t shared_heap_kept(void) { return heap.kept; }

void shared_heap_trim(void) {
  if (!is_open) return;
  pthread_mutex_lock(&heap.lock);
  clean_all();
  pthread_mutex_unlock(&heap.lock);
}
