/* Products of tiles, for kernels that have any: the header with the vector instructions takes long to read. */
#ifdef __AVX512F__
#include <immintrin.h>
#endif

/* to[c][r] = from[r][c] of 32-bit words */
T_CALL void t_transpose(uint32_t* restrict to, const uint32_t* restrict from, int rows, int columns) {
  int r = 0;
#ifdef __AVX512F__
  for (; r + 16 <= rows; r += 16) {
    int c = 0;
    for (; c + 16 <= columns; c += 16) {
      __m512i x[16], y[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(from + (long)(r + i) * columns + c);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
        x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (long)(c + i) * rows + r, x[i]);
    }
    for (; c < columns; c++)
      for (int i = r; i < r + 16; i++) to[(long)c * rows + i] = from[(long)i * columns + c];
  }
#endif
  for (; r < rows; r++)
    for (int c = 0; c < columns; c++) to[(long)c * rows + r] = from[(long)r * columns + c];
}

/* rows 2i and 2i+1 of a 16-bit tile as one row of words */
T_CALL void t_pair_rows(uint32_t* restrict to, const uint16_t* restrict from, int rows, int columns) {
  for (int r = 0; r < rows / 2; r++)
#pragma omp simd
    for (int c = 0; c < columns; c++)
      to[r * columns + c] = from[2 * r * columns + c] | (uint32_t)from[(2 * r + 1) * columns + c] << 16;
}

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

T_INLINE void t_dot_f32(const float* a, const float* b, float* c, int rows, int columns, int depth, int zero) {
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
  __m512bh v[WIDTH]; \
  _Pragma("GCC unroll 4") for (int j = 0; j < WIDTH; j++) v[j] = (__m512bh)_mm512_loadu_si512(b + k * ldb + 16 * j);
#define T_STEP_BF16 \
  s[i][j] = (t_vector)_mm512_dpbf16_ps((__m512)s[i][j], (__m512bh)_mm512_set1_epi32((int)a[i * lda + k]), v[j]);
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

/* AMX: a tile register holds 16 rows of 64 bytes, as `a` and `b` lie in memory; two by two tiles of c at a time */
#ifdef __AMX_BF16__
T_INLINE void t_tiles_begin(void) {
  struct { uint8_t palette, row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } T_ALIGNED config = {1};
  for (int i = 0; i < 8; i++) { config.bytes[i] = 64; config.rows[i] = 16; }
  _tile_loadconfig(&config);
}
T_INLINE void t_tiles_end(void) { _tile_release(); }
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
T_CALL void t_dot_tiles(const uint32_t* a, const uint32_t* b, float* c, int rows, int columns, int pairs, int zero) {
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
T_INLINE void t_tiles_begin(void) {}
T_INLINE void t_tiles_end(void) {}
#endif

T_INLINE void t_dot_bf16(const t_bf16* a16, const uint32_t* b, float* c, int rows, int columns, int depth, int zero) {
  const uint32_t* a = (const uint32_t*)a16;
  int n = 0, pairs = depth / 2;
#ifdef __AMX_BF16__
  if (rows % 16 == 0 && columns % 16 == 0 && depth % 32 == 0) {
    t_dot_tiles(a, b, c, rows, columns, pairs, zero);
    return;
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

/* any other element types: c += a b */
#define t_dot_any(a, b, c, rows, columns, depth, zero) do { \
    if (zero) memset(c, 0, sizeof *(c) * (rows) * (columns)); \
    for (int i = 0; i < (rows); i++) for (int k = 0; k < (depth); k++) { \
      const __typeof__(*(c)) x = (a)[i * (depth) + k]; \
      _Pragma("omp simd") for (int j = 0; j < (columns); j++) \
        (c)[i * (columns) + j] += x * (__typeof__(*(c)))(b)[k * (columns) + j]; \
    } } while (0)
#define t_dot_f64 t_dot_any
#define t_dot_i32 t_dot_any
