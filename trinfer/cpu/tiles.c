/* The parts of products of tiles that kernels call: declared in tiles.h, compiled once, with the runtime. */
#include "prelude.h"
#include "tiles.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

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
void t_dot_tiles(const uint32_t* a, const uint32_t* b, float* c, int rows, int columns, int pairs, int zero) {
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
