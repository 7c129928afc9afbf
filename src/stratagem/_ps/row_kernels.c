/* Kernels for rows of tables: gather, sort ids, sum repeated rows, and parts of the steps of SGD and Adagrad. And the checksum
   of checkpoints.

   Plain C without Python's interface: `row_kernels.py` loads the library and calls it. It is optional; without it
   `rows.py` and `server/row_step.py` use torch, with the same results. Callers check ids, types and sizes. Ids may lie in memory that another process can change after
   the check, so that a kernel treats an id out of range as 0: it never reads or writes outside a table.

   A row that is needed soon is prefetched: the rows of a batch are far apart in memory, so that without it every
   row waits for main memory. */

#include <stdint.h>
#include <string.h>

/* One version of a function for processors with FMA (fused multiply and add), another for all others. torch has both, too,
   and rounds in the same way: a * b + c is one operation where the processor has it. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VERSIONS __attribute__((target_clones("fma", "default")))
#else
#define VERSIONS
#endif

/* The arrays of a loop do not overlap. */
#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

#define LINE 64        /* bytes that are prefetched at once */
#define LINES 4        /* of a row; the processor itself prefetches the rest of a longer one */
#define AHEAD 32       /* rows: enough to cover the time of an access to main memory */
#define DIGIT 11       /* most bits that one pass of a sort looks at */
#define PASSES 6       /* most passes: for 64 bits */

/* Number of the functions below, as `row_kernels.py` calls them: increase both if a function changes. */
int64_t sg_version(void) { return 4; }

static inline void prefetch_read(const char *row, int64_t bytes) {
    for (int64_t line = 0; line < bytes && line < LINES * LINE; line += LINE)
        __builtin_prefetch(row + line, 0, 3);
}

static inline void prefetch_write(const char *row, int64_t bytes) {
    for (int64_t line = 0; line < bytes && line < LINES * LINE; line += LINE)
        __builtin_prefetch(row + line, 1, 3);
}

/* Copy a row; the compiler turns copies of a known size into a few instructions. */
static inline void copy_row(char *to, const char *from, int64_t bytes) {
    switch (bytes) {
    case 32: memcpy(to, from, 32); break;
    case 64: memcpy(to, from, 64); break;
    case 128: memcpy(to, from, 128); break;
    case 256: memcpy(to, from, 256); break;
    default: memcpy(to, from, (size_t)bytes);
    }
}

static inline int64_t inside(int64_t id, int64_t rows) {
    return (uint64_t)id < (uint64_t)rows ? id : 0;
}

/* Return 1 if all ids are from 0 to below `rows`. */
VERSIONS int sg_in_range(const int64_t *ids, int64_t count, int64_t rows) {
    uint64_t bad = 0;
    for (int64_t i = 0; i < count; i++)
        bad |= (uint64_t)((uint64_t)ids[i] >= (uint64_t)rows);
    return bad == 0;
}

/* Copy rows of a table in `shards` pieces: piece s has the rows from firsts[s] to below firsts[s + 1]. */
VERSIONS void sg_take_rows(const char *const *tables, const int64_t *firsts, int64_t shards,
                           const int64_t *ids, int64_t count, int64_t bytes, char *out) {
    const char *rows[AHEAD]; /* of the next ids, in turn */
    for (int64_t i = 0; i < count + AHEAD; i++) {
        const char **row = rows + i % AHEAD;
        if (i >= AHEAD) copy_row(out + (i - AHEAD) * bytes, *row, bytes);
        if (i >= count) continue;
        int64_t id = inside(ids[i], firsts[shards]), shard = 0;
        for (int64_t s = 1; s < shards; s++) shard += id >= firsts[s]; /* no branch to predict */
        *row = tables[shard] + (id - firsts[shard]) * bytes;
        prefetch_read(*row, bytes);
    }
}

static int bits_of(uint64_t most) {
    int bits = 0;
    while (bits < 64 && (most >> bits) != 0) bits++;
    return bits;
}

/* Make the keys of a sort, and count their digits. `passes` is a constant where this is called, for speed. */
static inline __attribute__((always_inline)) void make_keys(
    const int64_t *ids, int64_t count, uint64_t least, int position_bits, int digit, int passes,
    uint64_t *keys, uint32_t (*counts)[1 << DIGIT]) {
    uint64_t last = ((uint64_t)1 << digit) - 1;
    for (int64_t i = 0; i < count; i++) {
        uint64_t id = (uint64_t)ids[i] - least;
        keys[i] = id << position_bits | (uint64_t)i;
        for (int pass = 0; pass < passes; pass++) counts[pass][id >> pass * digit & last]++;
    }
}

/* Sort (id - least) << position_bits | position by id; equal ids stay in the order of their positions. The result is in
   `sorted`, `other` is overwritten. Callers check that `id_bits` of an id and its position fit into 64 bits, and `count` into 32. */
static void sort_keys(const int64_t *ids, int64_t count, uint64_t least, int id_bits, int position_bits,
                      uint64_t *sorted, uint64_t *other) {
    int passes = (id_bits + DIGIT - 1) / DIGIT;
    int digit = passes ? (id_bits + passes - 1) / passes : 0;
    uint64_t last = ((uint64_t)1 << digit) - 1;
    uint32_t ends[PASSES][1 << DIGIT];
    memset(ends, 0, sizeof(ends[0]) * (size_t)passes);
    uint64_t *from = passes % 2 ? other : sorted, *to = passes % 2 ? sorted : other;
    switch (passes) {
    case 1: make_keys(ids, count, least, position_bits, digit, 1, from, ends); break;
    case 2: make_keys(ids, count, least, position_bits, digit, 2, from, ends); break;
    case 3: make_keys(ids, count, least, position_bits, digit, 3, from, ends); break;
    default: make_keys(ids, count, least, position_bits, digit, passes, from, ends);
    }
    for (int pass = 0; pass < passes; pass++) {
        int shift = position_bits + pass * digit;
        uint32_t before = 0, *end = ends[pass];
        for (uint64_t bucket = 0; bucket <= last; bucket++) {
            uint32_t size = end[bucket];
            end[bucket] = before;
            before += size;
        }
        for (int64_t i = 0; i < count; i++) to[end[from[i] >> shift & last]++] = from[i];
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
}

/* Sort ids, equal ones in the order of their positions.

   unique[u]: the distinct ids in order; starts[u]: where each begins in `order`; order[i]: the position of the i-th
   id in order; places[p]: which of `unique` position p has. All have room for `count` numbers. Returns the number of
   distinct ids, or -1 if id and position together do not fit into 64 bits, or there are 2^32 ids; then nothing is written. */
int64_t sg_sort_ids(const int64_t *ids, int64_t count, int64_t *unique, int64_t *places,
                    int64_t *order, int64_t *starts) {
    if (count <= 0) return 0;
    if (count > UINT32_MAX) return -1;
    int64_t least = ids[0], most = ids[0];
    for (int64_t i = 1; i < count; i++) {
        if (ids[i] < least) least = ids[i];
        if (ids[i] > most) most = ids[i];
    }
    int position_bits = bits_of((uint64_t)count), id_bits = bits_of((uint64_t)most - (uint64_t)least);
    if (id_bits + position_bits > 64) return -1;

    /* The numbers in `order` are then replaced one by one. */
    uint64_t *keys = (uint64_t *)order;
    sort_keys(ids, count, (uint64_t)least, id_bits, position_bits, keys, (uint64_t *)places);
    uint64_t mask = ((uint64_t)1 << position_bits) - 1, last = 0;
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t key = keys[i], id = key >> position_bits;
        int64_t position = (int64_t)(key & mask);
        if (i == 0 || id != last) {
            unique[found] = (int64_t)(id + (uint64_t)least);
            starts[found++] = i;
            last = id;
        }
        order[i] = position;
        places[position] = found - 1;
    }
    return found;
}

/* Sort the numbers of rows in `parts` consecutive ranges: range p has the numbers from edges[p] to below edges[p + 1].

   keys: number and position of each, sorted; `other` is overwritten. ends[p]: where range p ends in `keys`;
   distinct[p]: how many different numbers it has. Returns the bits of a position in a key, or -1 if both do not fit into 64
   bits, there are 2^32 numbers, or one is outside the ranges; then the result is not to be used. */
int64_t sg_group_rows(const int64_t *numbers, int64_t count, const int64_t *edges, int64_t parts,
                      uint64_t *keys, uint64_t *other, int64_t *ends, int64_t *distinct) {
    int position_bits = bits_of((uint64_t)count), id_bits = bits_of((uint64_t)edges[parts]);
    if (count < 0 || count > UINT32_MAX || id_bits + position_bits > 64) return -1;
    for (int64_t i = 0; i < count; i++)
        if ((uint64_t)numbers[i] >= (uint64_t)edges[parts]) return -1;
    sort_keys(numbers, count, 0, id_bits, position_bits, keys, other);
    int64_t i = 0;
    for (int64_t part = 0; part < parts; part++) {
        uint64_t limit = (uint64_t)edges[part + 1], last = UINT64_MAX;
        distinct[part] = 0;
        for (; i < count && keys[i] >> position_bits < limit; i++) {
            distinct[part] += keys[i] >> position_bits != last;
            last = keys[i] >> position_bits;
        }
        ends[part] = i;
    }
    return position_bits;
}

/* Add to each id the shift of its shard; shard s begins with id firsts[s]. */
VERSIONS void sg_shift_ids(const int64_t *ids, int64_t count, const int64_t *firsts,
                           const int64_t *shifts, int64_t shards, int64_t *out) {
    for (int64_t i = 0; i < count; i++) {
        int64_t id = ids[i], shard = 0;
        for (int64_t s = 1; s < shards; s++) shard += id >= firsts[s];
        out[i] = id + shifts[shard];
    }
}

/* Sum the rows of some distinct ids, each in the order of positions; `order` as above, `starts` of these ids. `count` is where the
   last of them ends in `order`. */
VERSIONS void sg_sum_rows(const float *values, const int64_t *order, const int64_t *starts,
                          int64_t unique, int64_t count, int64_t width, float *out) {
    int64_t bytes = width * (int64_t)sizeof(float);
    for (int64_t u = 0; u < unique; u++) {
        int64_t end = u + 1 < unique ? starts[u + 1] : count;
        float *total = out + u * width;
        for (int64_t i = starts[u]; i < end; i++) {
            const float *row = values + order[i] * width;
            if (i + AHEAD < count) prefetch_read((const char *)(values + order[i + AHEAD] * width), bytes);
            if (i == starts[u]) {
                INDEPENDENT
                for (int64_t j = 0; j < width; j++) total[j] = 0.0f + row[j]; /* as a sum that begins with 0 */
            } else {
                INDEPENDENT
                for (int64_t j = 0; j < width; j++) total[j] += row[j];
            }
        }
    }
}

/* Sum the rows of the ranges from `begin` to below `last_part` of `sg_group_rows`, those of each number in the order of
   positions. ids: the numbers, counted from the first of their range. */
VERSIONS void sg_sum_groups(const float *values, int64_t width, const uint64_t *keys, int64_t position_bits,
                            const int64_t *edges, const int64_t *ends, int64_t begin, int64_t last_part,
                            float *out, int64_t *ids) {
    int64_t bytes = width * (int64_t)sizeof(float), i = begin ? ends[begin - 1] : 0, stop = ends[last_part - 1];
    uint64_t mask = ((uint64_t)1 << position_bits) - 1;
    for (int64_t part = begin; part < last_part; part++) {
        while (i < ends[part]) {
            uint64_t number = keys[i] >> position_bits;
            for (int64_t first = i; i < ends[part] && keys[i] >> position_bits == number; i++) {
                const float *row = values + (int64_t)(keys[i] & mask) * width;
                if (i + AHEAD < stop)
                    prefetch_read((const char *)(values + (int64_t)(keys[i + AHEAD] & mask) * width), bytes);
                if (i == first) {
                    INDEPENDENT
                    for (int64_t j = 0; j < width; j++) out[j] = 0.0f + row[j]; /* as a sum that begins with 0 */
                } else {
                    INDEPENDENT
                    for (int64_t j = 0; j < width; j++) out[j] += row[j];
                }
            }
            *ids++ = (int64_t)number - edges[part];
            out += width;
        }
    }
}

/* torch's SGD without momentum and decay, on rows; `rate` is the negative learning rate. */
VERSIONS void sg_step_sgd(float *table, int64_t rows, const int64_t *ids, const float *values,
                          int64_t count, int64_t width, float rate) {
    int64_t bytes = width * (int64_t)sizeof(float);
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) prefetch_write((const char *)(table + inside(ids[i + AHEAD], rows) * width), bytes);
        float *row = table + inside(ids[i], rows) * width;
        const float *gradient = values + i * width;
        INDEPENDENT
        for (int64_t j = 0; j < width; j++) row[j] += rate * gradient[j];
    }
}

/* Adagrad's step has two halves. Between them torch takes the roots, since its function rounds in a way of its own.
   The first half adds squares to rows of the sums, and copies the new sums to `totals`. */
VERSIONS void sg_add_squares(float *sums, int64_t rows, const int64_t *ids, const float *values,
                             int64_t count, int64_t width, float *totals) {
    int64_t bytes = width * (int64_t)sizeof(float);
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) prefetch_write((const char *)(sums + inside(ids[i + AHEAD], rows) * width), bytes);
        float *row = sums + inside(ids[i], rows) * width, *total = totals + i * width;
        const float *gradient = values + i * width;
        INDEPENDENT
        for (int64_t j = 0; j < width; j++) {
            float sum = row[j] + gradient[j] * gradient[j];
            row[j] = sum;
            total[j] = sum;
        }
    }
}

/* Add rate * value / (root + epsilon) to rows of a table. */
VERSIONS void sg_add_quotients(float *table, int64_t rows, const int64_t *ids, const float *values,
                               const float *roots, int64_t count, int64_t width, float rate,
                               float epsilon) {
    int64_t bytes = width * (int64_t)sizeof(float);
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) prefetch_write((const char *)(table + inside(ids[i + AHEAD], rows) * width), bytes);
        float *row = table + inside(ids[i], rows) * width;
        const float *value = values + i * width, *root = roots + i * width;
        INDEPENDENT
        for (int64_t j = 0; j < width; j++) row[j] += rate * value[j] / (root[j] + epsilon);
    }
}

#define PART 256 /* ids that are looked up before their rows are copied */

/* Copy rows that are about to change, once each, in units of 2^unit_bits rows. `places` has the place of the copy of each unit, 0
   without one. New places are taken from the end of `free_places`, at most `allowed`. A block has copies at 2^block_bits
   places, for each of the tables; blocks[block * tables + t] are those of table t. Rows of table t before safe[t] need no copies;
   `first` is the least of these. Returns how many ids are done: fewer than `count` if no place was left; *used: places taken. */
VERSIONS int64_t sg_keep_rows(const int64_t *ids, int64_t count, int64_t rows, int64_t first,
                              int64_t unit_bits, int32_t *places, const int32_t *free_places,
                              int64_t free_count, int64_t allowed, const int64_t *safe, int64_t tables,
                              const char *const *tables_at, const int64_t *row_bytes,
                              char *const *blocks, int64_t block_bits, int64_t *used) {
    int64_t units[PART], unit_rows = (int64_t)1 << unit_bits, mask = ((int64_t)1 << block_bits) - 1;
    int64_t taken = 0, done = 0;
    for (int is_full = 0; done < count && !is_full;) {
        int64_t end = done + PART < count ? done + PART : count, found = 0, before = taken;
        for (int64_t i = done; i < end; i++) __builtin_prefetch(places + (inside(ids[i], rows) >> unit_bits), 1, 3);
        for (; done < end; done++) {
            int64_t unit = inside(ids[done], rows) >> unit_bits;
            if (((unit + 1) << unit_bits) <= first || places[unit]) continue;
            if (taken == allowed) {
                is_full = 1;
                break;
            }
            places[unit] = free_places[free_count - ++taken];
            units[found++] = unit;
            for (int64_t t = 0; t < tables; t++)
                prefetch_read(tables_at[t] + (unit << unit_bits) * row_bytes[t], row_bytes[t] << unit_bits);
        }
        for (int64_t i = 0; i < found; i++) {
            int64_t unit = units[i], start = unit << unit_bits, place = free_places[free_count - 1 - before - i];
            int64_t size = start + unit_rows < rows ? unit_rows : rows - start;
            for (int64_t t = 0; t < tables; t++)
                if (start + size > safe[t])
                    copy_row(blocks[(place >> block_bits) * tables + t] + ((place & mask) << unit_bits) * row_bytes[t],
                             tables_at[t] + start * row_bytes[t], size * row_bytes[t]);
        }
    }
    *used = taken;
    return done;
}

/* Put the copies of `sg_keep_rows` of the rows of one table from `first` to below `last` into `out`, which has these rows. */
VERSIONS void sg_put_kept_rows(const int32_t *places, int64_t first, int64_t last, int64_t unit_bits,
                               char *const *blocks, int64_t block_bits, int64_t tables, int64_t table,
                               int64_t row_bytes, char *out) {
    int64_t mask = ((int64_t)1 << block_bits) - 1, end = (last + ((int64_t)1 << unit_bits) - 1) >> unit_bits;
    for (int64_t unit = first >> unit_bits; unit < end; unit++) {
        int64_t place = places[unit], start = unit << unit_bits, size = (int64_t)1 << unit_bits;
        if (!place) continue;
        const char *kept = blocks[(place >> block_bits) * tables + table] + ((place & mask) << unit_bits) * row_bytes;
        if (start < first) {
            kept += (first - start) * row_bytes;
            size -= first - start;
            start = first;
        }
        if (start + size > last) size = last - start;
        copy_row(out + (start - first) * row_bytes, kept, size * row_bytes);
    }
}

/* CRC-32 of zip. A remainder of 64 bytes stands for all bytes so far: multiplied by a power of x (carry-less), it is added to
   the bytes that many bits later. The two powers for a distance of n bits are those of n + 32 and n - 32. */
#if defined(__x86_64__) && (__GNUC__ >= 9 || __clang_major__ >= 9)
#include <immintrin.h>
#define NARROW __attribute__((target("pclmul,sse4.1")))
#define WIDE __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.1")))
#define POWERS_512 _mm_set_epi64x(0x1c6e41596, 0x154442bd4)
#define POWERS_2048 _mm_set_epi64x(0x1322d1430, 0x11542778a)

NARROW static void fold(unsigned char *rest, const unsigned char *at, int64_t count) {
    const __m128i powers = POWERS_512;
    __m128i r[4];
    memcpy(r, rest, 64);
    for (; count >= 64; count -= 64, at += 64)
        for (int i = 0; i < 4; i++) {
            __m128i low = _mm_clmulepi64_si128(r[i], powers, 0x00), high = _mm_clmulepi64_si128(r[i], powers, 0x11);
            r[i] = _mm_xor_si128(_mm_xor_si128(low, high), _mm_loadu_si128((const __m128i *)at + i));
        }
    memcpy(rest, r, 64);
}

WIDE static inline __m512i folded(__m512i rest, __m512i powers, __m512i next) {
    __m512i low = _mm512_clmulepi64_epi128(rest, powers, 0x00), high = _mm512_clmulepi64_epi128(rest, powers, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* all three added */
}

/* The same with four remainders at once, for at least 192 bytes. */
WIDE static void fold_wide(unsigned char *rest, const unsigned char *at, int64_t count) {
    const __m512i powers = _mm512_broadcast_i32x4(POWERS_512), far = _mm512_broadcast_i32x4(POWERS_2048);
    __m512i r[4] = {_mm512_loadu_si512(rest), _mm512_loadu_si512(at), _mm512_loadu_si512(at + 64), _mm512_loadu_si512(at + 128)};
    at += 192, count -= 192;
    for (; count >= 256; count -= 256, at += 256)
        for (int i = 0; i < 4; i++) r[i] = folded(r[i], far, _mm512_loadu_si512(at + 64 * i));
    for (int i = 1; i < 4; i++) r[i] = folded(r[i - 1], powers, r[i]);
    for (; count >= 64; count -= 64, at += 64) r[3] = folded(r[3], powers, _mm512_loadu_si512(at));
    _mm512_storeu_si512(rest, r[3]);
}
#endif

/* Return the CRC-32 of bytes, continued from that of the bytes before; -1 if this takes a processor with other instructions. */
int64_t sg_crc32(const unsigned char *at, int64_t count, int64_t before) {
#ifdef WIDE
    if (count >= 256 && __builtin_cpu_supports("pclmul")) {
        unsigned char rest[64];
        uint32_t crc = ~(uint32_t)before;
        memcpy(rest, at, 64);
        for (int i = 0; i < 4; i++) rest[i] ^= crc >> 8 * i;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq"))
            fold_wide(rest, at + 64, count - 64);
        else
            fold(rest, at + 64, count - 64);
        crc = 0;
        for (int64_t i = 0, end = 64 + count % 64; i < end; i++) {
            crc ^= i < 64 ? rest[i] : at[count - end + i];
            for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
        }
        return ~crc;
    }
#else
    (void)at, (void)count, (void)before;
#endif
    return -1;
}
