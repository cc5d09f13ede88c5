/* The parts of products of tiles that kernels call: declared in tiles.h, compiled once, with the runtime. */
#include "prelude.h"
#include "tiles.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef uint32_t t_words __attribute__((vector_size(64), aligned(4), may_alias));
#ifdef __clang__
#define T_MERGE(WHICH, X, Y) T_MERGE_CLANG(X, Y, WHICH)
#define T_MERGE_CLANG(X, Y, ...) __builtin_shufflevector(X, Y, __VA_ARGS__)
#else
#define T_MERGE(WHICH, X, Y) __builtin_shuffle(X, Y, (t_words){WHICH})
#endif
#define T_LOW_WORDS 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define T_HIGH_WORDS 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define T_LOW_PAIRS 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define T_HIGH_PAIRS 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define T_EVEN_FOURS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define T_ODD_FOURS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31

void t_transpose(uint32_t* restrict to, const uint32_t* restrict from, int rows, int columns) {
  int r = 0;
#ifdef __AVX512F__
  for (; r + 16 <= rows; r += 16) {
    int c = 0;
    for (; c + 16 <= columns; c += 16) {
      t_words x[16], y[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) x[i] = *(const t_words*)(from + (long)(r + i) * columns + c);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        y[2 * i] = T_MERGE(T_LOW_WORDS, x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = T_MERGE(T_HIGH_WORDS, x[2 * i], x[2 * i + 1]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        x[4 * i] = T_MERGE(T_LOW_PAIRS, y[4 * i], y[4 * i + 2]);
        x[4 * i + 1] = T_MERGE(T_HIGH_PAIRS, y[4 * i], y[4 * i + 2]);
        x[4 * i + 2] = T_MERGE(T_LOW_PAIRS, y[4 * i + 1], y[4 * i + 3]);
        x[4 * i + 3] = T_MERGE(T_HIGH_PAIRS, y[4 * i + 1], y[4 * i + 3]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        y[i] = T_MERGE(T_EVEN_FOURS, x[i], x[i + 4]);
        y[i + 4] = T_MERGE(T_ODD_FOURS, x[i], x[i + 4]);
        y[i + 8] = T_MERGE(T_EVEN_FOURS, x[i + 8], x[i + 12]);
        y[i + 12] = T_MERGE(T_ODD_FOURS, x[i + 8], x[i + 12]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        x[i] = T_MERGE(T_EVEN_FOURS, y[i], y[i + 8]);
        x[i + 8] = T_MERGE(T_ODD_FOURS, y[i], y[i + 8]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) *(t_words*)(to + (long)(c + i) * rows + r) = x[i];
    }
    for (; c < columns; c++)
      for (int i = r; i < r + 16; i++) to[(long)c * rows + i] = from[(long)i * columns + c];
  }
#endif
  for (; r < rows; r++)
    for (int c = 0; c < columns; c++) to[(long)c * rows + r] = from[(long)r * columns + c];
}

void t_pair_rows(uint32_t* restrict to, const uint16_t* restrict from, int rows, int columns) {
  for (int r = 0; r < rows / 2; r++)
#pragma omp simd
    for (int c = 0; c < columns; c++)
      to[r * columns + c] = from[2 * r * columns + c] | (uint32_t)from[(2 * r + 1) * columns + c] << 16;
}

/* AMX: a tile register holds 16 rows of 64 bytes, two by two tiles of c at a time */
#ifdef __AMX_BF16__
void t_tiles_begin(void) {
  struct { uint8_t palette, row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } T_ALIGNED config = {1};
  for (int i = 0; i < 8; i++) { config.bytes[i] = 64; config.rows[i] = 16; }
  _tile_loadconfig(&config);
}
void t_tiles_end(void) { _tile_release(); }
#define T_TILES(HEIGHT, WIDTH) do { \
    float *c0 = c + (long)m * columns + n, *c1 = c0 + 16L * columns; \
    const uint32_t *a0 = a + (long)m * pairs, *a1 = a0 + 16L * pairs; \
    if (zero) { _tile_zero(0); if (WIDTH > 1) _tile_zero(1); if (HEIGHT > 1) _tile_zero(2); if (HEIGHT * WIDTH > 2) _tile_zero(3); } \
    else { _tile_loadd(0, c0, stride); if (WIDTH > 1) _tile_loadd(1, c0 + 16, stride); \
      if (HEIGHT > 1) _tile_loadd(2, c1, stride); if (HEIGHT * WIDTH > 2) _tile_loadd(3, c1 + 16, stride); } \
    for (int k = 0; k < pairs; k += 16) { \
      const uint32_t* b0 = b + (long)k * columns + n; \
      _tile_loadd(4, a0 + k, 4L * pairs); _tile_loadd(6, b0, stride); _tile_dpbf16ps(0, 4, 6); \
      if (WIDTH > 1) { _tile_loadd(7, b0 + 16, stride); _tile_dpbf16ps(1, 4, 7); } \
      if (HEIGHT > 1) { _tile_loadd(5, a1 + k, 4L * pairs); _tile_dpbf16ps(2, 5, 6); } \
      if (HEIGHT * WIDTH > 2) _tile_dpbf16ps(3, 5, 7); \
    } \
    _tile_stored(0, c0, stride); if (WIDTH > 1) _tile_stored(1, c0 + 16, stride); \
    if (HEIGHT > 1) _tile_stored(2, c1, stride); if (HEIGHT * WIDTH > 2) _tile_stored(3, c1 + 16, stride); \
  } while (0)
static void t_dot_tiles(const uint32_t* a, const uint32_t* b, float* c, int rows, int columns, int pairs, int zero) {
  const long stride = 4L * columns;
  for (int m = 0; m < rows; m += 32)
    for (int n = 0; n < columns; n += 32) {
      if (m + 32 <= rows && n + 32 <= columns) T_TILES(2, 2);
      else if (m + 32 <= rows) T_TILES(2, 1);
      else if (n + 32 <= columns) T_TILES(1, 2);
      else T_TILES(1, 1);
    }
}
#else
void t_tiles_begin(void) {}
void t_tiles_end(void) {}
#endif

/* c[M][N] = (start at zero ? 0 : c) + a[M][K] b[K][N], one register block of HEIGHT rows by WIDTH vectors of 16.
   The product is summed by itself before it is added: over a loop of blocks of K, rounding errors add up per block. */
#define T_DOT_BLOCK(NAME, HEIGHT, WIDTH, A, B, FETCH, STEP) \
  T_INLINE void NAME(const A* restrict a, long lda, const B* restrict b, long ldb, float* restrict c, long ldc, int depth, int zero) { \
    t_vector s[HEIGHT][WIDTH]; \
    _Pragma("GCC unroll 12") for (int i = 0; i < HEIGHT; i++) \
      _Pragma("GCC unroll 4") for (int j = 0; j < WIDTH; j++) \
        s[i][j] = (t_vector){0}; \
    for (int k = 0; k < depth; k++) { \
      FETCH(WIDTH) \
      _Pragma("GCC unroll 12") for (int i = 0; i < HEIGHT; i++) { \
        _Pragma("GCC unroll 4") for (int j = 0; j < WIDTH; j++) STEP } \
    } \
    _Pragma("GCC unroll 12") for (int i = 0; i < HEIGHT; i++) \
      _Pragma("GCC unroll 4") for (int j = 0; j < WIDTH; j++) { \
        t_vector* sum = (t_vector*)(c + i * ldc + 16 * j); \
        if (zero) *sum = s[i][j]; else *sum += s[i][j]; } \
  }
#define T_DOT_PANEL(NAME, BLOCK, WIDTH, A, B) \
  T_INLINE void NAME(const A* a, long lda, const B* b, long ldb, float* c, long ldc, int rows, int depth, int zero) { \
    int i = 0; \
    for (; i + 8 <= rows; i += 8) BLOCK##_8x##WIDTH(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth, zero); \
    if (rows & 4) { BLOCK##_4x##WIDTH(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth, zero); i += 4; } \
    if (rows & 2) { BLOCK##_2x##WIDTH(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth, zero); i += 2; } \
    if (rows & 1) BLOCK##_1x##WIDTH(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth, zero); \
  }
#define T_DOT_BLOCKS(BLOCK, WIDTH, A, B, FETCH, STEP) \
  T_DOT_BLOCK(BLOCK##_8x##WIDTH, 8, WIDTH, A, B, FETCH, STEP) \
  T_DOT_BLOCK(BLOCK##_4x##WIDTH, 4, WIDTH, A, B, FETCH, STEP) \
  T_DOT_BLOCK(BLOCK##_2x##WIDTH, 2, WIDTH, A, B, FETCH, STEP) \
  T_DOT_BLOCK(BLOCK##_1x##WIDTH, 1, WIDTH, A, B, FETCH, STEP) \
  T_DOT_PANEL(BLOCK##_panel##WIDTH, BLOCK, WIDTH, A, B)

#define T_FETCH_F32(WIDTH) \
  t_vector v[WIDTH]; \
  _Pragma("GCC unroll 4") for (int j = 0; j < WIDTH; j++) v[j] = *(const t_vector*)(b + k * ldb + 16 * j);
T_DOT_BLOCKS(t_f32, 2, float, float, T_FETCH_F32, s[i][j] += a[i * lda + k] * v[j];)
T_DOT_BLOCKS(t_f32, 1, float, float, T_FETCH_F32, s[i][j] += a[i * lda + k] * v[j];)

void t_dot_f32(const float* a, const float* b, float* c, int rows, int columns, int depth, int zero) {
  int n = 0;
  for (; n + 32 <= columns; n += 32) t_f32_panel2(a, depth, b + n, columns, c + n, columns, rows, depth, zero);
  if (columns - n >= 16) { t_f32_panel1(a, depth, b + n, columns, c + n, columns, rows, depth, zero); n += 16; }
  if (n == columns) return;
  for (int i = 0; i < rows; i++) {
    if (zero) for (int j = n; j < columns; j++) c[i * columns + j] = 0;
    for (int k = 0; k < depth; k++)
      for (int j = n; j < columns; j++) c[i * columns + j] += a[i * depth + k] * b[k * columns + j];
  }
}

/* a holds bf16 rows, b words of two bf16 rows: [K/2][N] */
#ifdef __AVX512BF16__
#define T_FETCH_BF16(WIDTH) \
  t_vector v[WIDTH]; \
  _Pragma("GCC unroll 4") for (int j = 0; j < WIDTH; j++) v[j] = *(const t_vector*)(b + k * ldb + 16 * j);
#define T_STEP_BF16 s[i][j] = (t_vector)_mm512_dpbf16_ps((__m512)s[i][j], (__m512bh)t_spread(a[i * lda + k]), (__m512bh)v[j]);

T_INLINE t_vector t_spread(uint32_t word) {
  return (t_vector)((t_words){0} + word);
}
#else
#define T_FETCH_BF16(WIDTH) \
  t_vector v[WIDTH], w[WIDTH]; \
  _Pragma("GCC unroll 4") for (int j = 0; j < WIDTH; j++) for (int l = 0; l < 16; l++) { \
    uint32_t word = b[k * ldb + 16 * j + l]; \
    v[j][l] = t_from_f32(word << 16); w[j][l] = t_from_f32(word & 0xffff0000u); }
#define T_STEP_BF16 \
  s[i][j] += t_from_f32(a[i * lda + k] << 16) * v[j] + t_from_f32(a[i * lda + k] & 0xffff0000u) * w[j];
#endif
T_DOT_BLOCKS(t_bf16, 2, uint32_t, uint32_t, T_FETCH_BF16, T_STEP_BF16)
T_DOT_BLOCKS(t_bf16, 1, uint32_t, uint32_t, T_FETCH_BF16, T_STEP_BF16)

void t_dot_bf16(const t_bf16* a16, const uint32_t* b, float* c, int rows, int columns, int depth, int zero) {
  const uint32_t* a = (const uint32_t*)a16;
  int n = 0, pairs = depth / 2;
#ifdef __AMX_BF16__
  if (columns % 16 == 0 && depth % 32 == 0) {
    const int whole = rows & ~15;
    t_dot_tiles(a, b, c, whole, columns, pairs, zero);
    a += whole * pairs, c += whole * columns, rows -= whole;
  }
#endif
  for (; n + 32 <= columns; n += 32) t_bf16_panel2(a, pairs, b + n, columns, c + n, columns, rows, pairs, zero);
  if (columns - n >= 16) { t_bf16_panel1(a, pairs, b + n, columns, c + n, columns, rows, pairs, zero); n += 16; }
  if (n == columns) return;
  for (int i = 0; i < rows; i++) {
    if (zero) for (int j = n; j < columns; j++) c[i * columns + j] = 0;
    for (int k = 0; k < pairs; k++)
      for (int j = n; j < columns; j++) {
        uint32_t x = a[i * pairs + k], y = b[k * columns + j];
        c[i * columns + j] += t_from_f32(x << 16) * t_from_f32(y << 16)
                            + t_from_f32(x & 0xffff0000u) * t_from_f32(y & 0xffff0000u);
      }
  }
}

/* the sums of sixteen vectors */
T_INLINE t_vector t_sums(const t_vector* v) {
#ifdef __AVX512F__
#define T_PAIRS(N, TYPE, LOW, HIGH, FROM, TO) \
  _Pragma("GCC unroll 8") for (int i = 0; i < N; i++) \
    TO[i] = (__m512)LOW((TYPE)FROM[2 * i], (TYPE)FROM[2 * i + 1]) + (__m512)HIGH((TYPE)FROM[2 * i], (TYPE)FROM[2 * i + 1]);
#define T_EVEN(A, B) _mm512_shuffle_f32x4(A, B, 0x88)
#define T_ODD(A, B) _mm512_shuffle_f32x4(A, B, 0xdd)
  __m512 x[8], y[4], z[2], sum[1];
  T_PAIRS(8, __m512, _mm512_unpacklo_ps, _mm512_unpackhi_ps, v, x)
  T_PAIRS(4, __m512d, _mm512_unpacklo_pd, _mm512_unpackhi_pd, x, y)
  T_PAIRS(2, __m512, T_EVEN, T_ODD, y, z)
  T_PAIRS(1, __m512, T_EVEN, T_ODD, z, sum)
  return (t_vector)sum[0];
#else
  t_vector sums;
  for (int i = 0; i < 16; i++) sums[i] = t_sum(v[i]);
  return sums;
#endif
}

#define T_ROWS_BLOCK(NAME, TOKENS, ROWS, W, LANES, LOAD, STEP) \
  T_CALL void NAME##_##TOKENS##x##ROWS(const t_vector* x, const W* w, long stride, int depth, float* c, long ldc, int share, int zero) { \
    t_vector s[16]; \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) s[i] = (t_vector){0}; \
    for (int k = 0; k < depth / LANES; k++, x += TOKENS) { \
      t_vector v[ROWS]; \
      _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) { \
        const W* from = w + r * share * stride + (long)k * LANES; \
        LOAD(v[r], from) \
        __builtin_prefetch(from + stride); \
      } \
      T_ROWS_STEPS(TOKENS, ROWS, STEP) \
    } \
    if (depth % LANES) { \
      t_vector v[ROWS]; \
      _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) { \
        W rest[LANES] T_ALIGNED = {0}; \
        memcpy(rest, w + r * share * stride + depth / LANES * LANES, depth % LANES * sizeof(W)); \
        LOAD(v[r], rest) \
      } \
      T_ROWS_STEPS(TOKENS, ROWS, STEP) \
    } \
    const t_vector sums = t_sums(s); \
    _Pragma("GCC unroll 16") for (int t = 0; t < TOKENS; t++) \
      _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) { \
        float* sum = c + t * ldc + r * share; \
        *sum = (zero ? 0 : *sum) + sums[t * ROWS + r]; \
      } \
  }
#define T_ROWS_STEPS(TOKENS, ROWS, STEP) \
  _Pragma("GCC unroll 8") for (int t = 0; t < TOKENS; t++) { \
    const t_vector u = x[t]; \
    _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) STEP(s[t * ROWS + r], u, v[r]) }

/* `packed` takes the vectors of `tokens` rows of a, in the order in which a block reads them */
#define T_ROWS_PRODUCT(NAME, W, LANES, LOAD, STEP) \
  T_ROWS_EACH(T_ROWS_BLOCKS, NAME, W, LANES, LOAD, STEP) \
  T_ROWS_PACK(NAME, W) { \
    for (int k = 0; k < depth; k += LANES) \
      for (int t = 0; t < tokens; t++, packed++) { \
        const int some = depth - k < LANES ? depth - k : LANES; \
        W part[LANES] T_ALIGNED = {0}; \
        if (some == LANES) { LOAD(*packed, (a + t * lda + k)) continue; } \
        memcpy(part, a + t * lda + k, some * sizeof(W)); \
        LOAD(*packed, part) \
      } \
  }
#define T_ROWS_BLOCKS(NAME, TOKENS, ROWS, W, LANES, LOAD, STEP) \
  T_ROWS_BLOCK(NAME, TOKENS, ROWS, W, LANES, LOAD, STEP) \
  T_ROWS_BLOCK(NAME, TOKENS, 1, W, LANES, LOAD, STEP) \
  T_ROWS_SOME(NAME, TOKENS, W) { \
    const int share = columns / ROWS; \
    for (int i = 0; i < share; i++) \
      NAME##_##TOKENS##x##ROWS(x, w + i * stride, stride, depth, c + i, ldc, share, zero); \
    for (int i = share * ROWS; i < columns; i++) \
      NAME##_##TOKENS##x1(x, w + i * stride, stride, depth, c + i, ldc, 0, zero); \
  }

#define T_LOAD_EACH(TO, FROM, CONVERT) { \
    float each[16] T_ALIGNED; \
    for (int l = 0; l < 16; l++) each[l] = CONVERT((FROM)[l]); \
    TO = *(const t_vector*)each; }
#define T_LOAD_FLOAT(TO, FROM) TO = *(const t_vector*)(FROM);
#define T_STEP_FLOAT(SUM, X, Y) SUM += X * Y;
T_ROWS_PRODUCT(t_rows_f32, float, 16, T_LOAD_FLOAT, T_STEP_FLOAT)

#ifdef __AVX512F__
#define T_LOAD_F16(TO, FROM) TO = (t_vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(FROM)));
#else
#define T_LOAD_F16(TO, FROM) T_LOAD_EACH(TO, FROM, t_f16_f32)
#endif
T_ROWS_PRODUCT(t_rows_f16, t_f16, 16, T_LOAD_F16, T_STEP_FLOAT)

#ifdef __AVX512BF16__
#define T_STEP_PAIRS(SUM, X, Y) SUM = (t_vector)_mm512_dpbf16_ps((__m512)SUM, (__m512bh)X, (__m512bh)Y);
T_ROWS_PRODUCT(t_rows_bf16, t_bf16, 32, T_LOAD_FLOAT, T_STEP_PAIRS)
#else
#ifdef __AVX512F__
#define T_LOAD_BF16(TO, FROM) \
  TO = (t_vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(FROM))), 16);
#else
#define T_LOAD_BF16(TO, FROM) T_LOAD_EACH(TO, FROM, t_bf16_f32)
#endif
T_ROWS_PRODUCT(t_rows_bf16, t_bf16, 16, T_LOAD_BF16, T_STEP_FLOAT)
#endif
