/* Products of tiles, for kernels that have any. What they share is compiled once, in tiles.c: the header with the
   vector instructions alone takes as long to read as a small kernel takes to compile. */

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

/* to[c][r] = from[r][c] of 32-bit words */
T_CALL void t_transpose(uint32_t* restrict to, const uint32_t* restrict from, int rows, int columns) {
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
  t_vector v[WIDTH]; \
  _Pragma("GCC unroll 4") for (int j = 0; j < WIDTH; j++) v[j] = *(const t_vector*)(b + k * ldb + 16 * j);
#define T_STEP_BF16 s[i][j] = t_add_pairs(s[i][j], t_spread(a[i * lda + k]), v[j]);

T_INLINE t_vector t_spread(uint32_t word) {
  return (t_vector)((t_words){0} + word);
}
/* sum + x y of pairs of bf16: what the intrinsic of the long header stands for */
T_INLINE t_vector t_add_pairs(t_vector sum, t_vector x, t_vector y) {
#if defined(__clang__)
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  return sum;
#else
#if __GNUC__ >= 13
  typedef __bf16 pairs __attribute__((vector_size(64)));
#else
  typedef short pairs __attribute__((vector_size(64)));
#endif
  return (t_vector)__builtin_ia32_dpbf16ps_v16sf(sum, (pairs)x, (pairs)y);
#endif
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

/* AMX: a tile register holds 16 rows of 64 bytes, as `a` and `b` lie in memory */
void t_tiles_begin(void);
void t_tiles_end(void);
void t_dot_tiles(const uint32_t* a, const uint32_t* b, float* c, int rows, int columns, int pairs, int zero);

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

/* ---- few rows of a times the rows of w, which stay where they lie: c[i][j] = (zero ? 0 : c[i][j]) + sum a[i][k] w[j][k]

   A block sums up to 16 products at once, each in a vector along k, and reads w in the order of memory. */

/* a block needs a register a product, one a row of w and one more */
#ifdef __AVX512F__
#define T_ROWS_MOST 8
#define T_ROWS_EACH(DO, NAME, ...) \
  DO(NAME, 1, 4, __VA_ARGS__) DO(NAME, 2, 4, __VA_ARGS__) DO(NAME, 3, 4, __VA_ARGS__) DO(NAME, 4, 4, __VA_ARGS__) \
  DO(NAME, 5, 3, __VA_ARGS__) DO(NAME, 6, 2, __VA_ARGS__) DO(NAME, 7, 2, __VA_ARGS__) DO(NAME, 8, 2, __VA_ARGS__)
#else
#define T_ROWS_MOST 4
#define T_ROWS_EACH(DO, NAME, ...) \
  DO(NAME, 1, 4, __VA_ARGS__) DO(NAME, 2, 2, __VA_ARGS__) DO(NAME, 3, 2, __VA_ARGS__) DO(NAME, 4, 2, __VA_ARGS__)
#endif
#define T_ROWS_DECLARE(NAME, TOKENS, ROWS, W) T_ROWS_SOME(NAME, TOKENS, W);
#define T_ROWS_SOME(NAME, TOKENS, W) \
  void NAME##_##TOKENS(const t_vector* x, const W* w, long stride, int depth, float* c, long ldc, int columns, int zero)
#define T_ROWS_PACK(NAME, W) void NAME##_pack(t_vector* packed, const W* a, long lda, int tokens, int depth)

/* m rows of a, n of w, k elements of each are there: what a mask leaves out counts as 0, even against infinity */
#define T_ROWS_DOT(NAME, W) \
  T_ROWS_EACH(T_ROWS_DECLARE, NAME, W) \
  T_ROWS_PACK(NAME, W); \
  T_INLINE void NAME(const W* a, const W* w, long stride, float* c, int rows, int columns, int depth, \
                     int m, int n, int k, int zero, t_vector* packed) { \
    const int groups = (m + T_ROWS_MOST - 1) / T_ROWS_MOST, size = groups ? (m + groups - 1) / groups : 0; \
    const long vectors = ((k - 1) / T_LANES_##NAME + 1) * size; \
    if (zero && (m < rows || n < columns || k <= 0)) memset(c, 0, sizeof(float) * rows * columns); \
    if (k <= 0) return; \
    for (int g = 0; g < groups; g++) \
      NAME##_pack(packed + g * vectors, a + (long)g * size * depth, depth, t_clip(m - g * size, 0, size), k); \
    for (int g = 0; g < groups; g++) { \
      const int tokens = t_clip(m - g * size, 0, size); \
      const t_vector* x = packed + g * vectors; \
      float* to = c + (long)g * size * columns; \
      T_ROWS_EACH(T_ROWS_CASE, NAME, ) \
    } \
  }
#define T_ROWS_CASE(NAME, TOKENS, ROWS, ...) \
  if (rows >= TOKENS && tokens == TOKENS) NAME##_##TOKENS(x, w, stride, k, to, columns, n, zero);

#define T_LANES_t_rows_f32 16
#define T_LANES_t_rows_f16 16
#ifdef __AVX512BF16__
#define T_LANES_t_rows_bf16 32
#else
#define T_LANES_t_rows_bf16 16
#endif
T_ROWS_DOT(t_rows_f32, float)
T_ROWS_DOT(t_rows_f16, t_f16)
T_ROWS_DOT(t_rows_bf16, t_bf16)
