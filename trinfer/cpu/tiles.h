/* Products of tiles, for kernels that have any. What they share is compiled once, in tiles.c: the header with the
   vector instructions alone takes as long to read as a small kernel takes to compile. */

/* ask for n elements, without waiting for them */
#define T_FETCH(P, N) \
  for (int i = 0; i < (N) * (int)sizeof *(P); i += 64) __builtin_prefetch((const char*)(P) + i);

/* to[c][r] = from[r][c] of 32-bit words */
void t_transpose(uint32_t* restrict to, const uint32_t* restrict from, int rows, int columns);
/* rows 2i and 2i+1 of a 16-bit tile as one row of words */
void t_pair_rows(uint32_t* restrict to, const uint16_t* restrict from, int rows, int columns);

/* c[M][N] = (zero ? 0 : c) + a[M][K] b[K][N]; for bf16 a holds rows, b words of two bf16 rows: [K/2][N] */
void t_dot_f32(const float* a, const float* b, float* c, int rows, int columns, int depth, int zero);
void t_dot_bf16(const t_bf16* a, const uint32_t* b, float* c, int rows, int columns, int depth, int zero);
/* around programs with products of bf16 tiles: what AMX has to be told */
void t_tiles_begin(void);
void t_tiles_end(void);

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
