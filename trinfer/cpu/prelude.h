/* What the emitted kernels are made of: number formats, functions that vectorise, atomics, vectors. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define T_INLINE static inline __attribute__((always_inline, unused))
#define T_CALL static __attribute__((noinline, unused))
#define T_ALIGNED __attribute__((aligned(64)))

typedef uint16_t t_bf16;

/* ---- bits: t_raw_X gives the bits of a register value in format X, t_from_X makes one of them */

T_INLINE uint32_t t_raw_f32(float x) { uint32_t r; memcpy(&r, &x, 4); return r; }
T_INLINE float t_from_f32(uint32_t x) { float r; memcpy(&r, &x, 4); return r; }
T_INLINE uint64_t t_raw_f64(double x) { uint64_t r; memcpy(&r, &x, 8); return r; }
T_INLINE double t_from_f64(uint64_t x) { double r; memcpy(&r, &x, 8); return r; }

/* ---- narrow formats: registers hold float; t_X_f32 reads memory, t_f32_X rounds to nearest even */

T_INLINE float t_bf16_f32(t_bf16 x) { return t_from_f32((uint32_t)x << 16); }
T_INLINE t_bf16 t_f32_bf16(float x) {
  uint32_t u = t_raw_f32(x), even = u + 0x7fff + ((u >> 16) & 1);
  return (t_bf16)((x != x ? u | 0x400000 : even) >> 16);
}
/* a float in the precision of f16, by bits: given a conversion there and back, gcc computes in halves where the CPU
   can, and makes of a product that is rounded and then added to one operation that does not round it */
T_INLINE float t_round_f16(float x) {
  uint32_t bits = t_raw_f32(x), sign = bits & 0x80000000u, a = bits & 0x7fffffffu;
  uint32_t normal = (a + 0xfff + ((a >> 13) & 1)) & 0xffffe000u, tiny = t_raw_f32((t_from_f32(a) + 0.5f) - 0.5f);
  uint32_t finite = a < 0x38800000u ? tiny : normal < 0x47800000u ? normal : 0x7f800000u;
  return t_from_f32(sign | (a > 0x7f800000u ? a : finite));
}
T_INLINE float t_from_f16(uint16_t x) {
  uint32_t a = x & 0x7fff, shifted = a << 13, tiny = t_raw_f32((float)(int32_t)a * 0x1p-24f);
  uint32_t r = a < 0x400 ? tiny : a < 0x7c00 ? shifted + (112u << 23) : shifted | 0x7f800000u;
  return t_from_f32(r | (uint32_t)(x & 0x8000) << 16);
}
/* made in the upper half of a word: gcc would mix 16 and 32 bits and not vectorise */
T_INLINE uint16_t t_raw_f16(float x) {
  uint32_t bits = t_raw_f32(t_round_f16(x)), a = bits & 0x7fffffffu, normal = (a - (112u << 23)) << 3;
  uint32_t tiny = (uint32_t)(int32_t)(t_from_f32(a < 0x38800000u ? a : 0) * 0x1p24f) << 16;
  uint32_t r = a < 0x38800000u ? tiny : a < 0x7f800000u ? normal : a == 0x7f800000u ? 0x7c000000u : 0x7e000000u;
  return (uint16_t)((r | (bits & 0x80000000u)) >> 16);
}
#ifdef __aarch64__
typedef _Float16 t_f16;
T_INLINE float t_f16_f32(t_f16 x) { return (float)x; }
T_INLINE t_f16 t_f32_f16(float x) { return (t_f16)x; }
#else
/* gcc does not vectorise conversions of _Float16 on x86, and before version 12 does not know it */
typedef uint16_t t_f16;
T_INLINE float t_f16_f32(t_f16 x) { return t_from_f16(x); }
T_INLINE t_f16 t_f32_f16(float x) { return t_raw_f16(x); }
#endif
T_INLINE float t_f8E5M2_f32(uint8_t x) { return t_from_f16((uint16_t)(x << 8)); }
T_INLINE uint8_t t_f32_f8E5M2(float x) {
  uint16_t u = t_raw_f16(x);
  return (uint8_t)((x != x ? u | 0x200 : u + 0x7f + ((u >> 8) & 1)) >> 8);
}
T_INLINE float t_f8E4M3FN_f32(uint8_t x) {
  uint32_t m = x & 0x7f;
  float normal = t_from_f32((m << 20) + (120u << 23)), tiny = (float)m * 0.001953125f;
  float r = m < 8 ? tiny : m == 127 ? NAN : normal;
  return x & 0x80 ? -r : r;
}
T_INLINE uint8_t t_f32_f8E4M3FN(float x) {
  uint32_t sign = (t_raw_f32(x) >> 24) & 0x80;
  float a = fabsf(x); a = a > 448.f ? 448.f : a;
  uint32_t b = t_raw_f32(a), normal = (b + 0x7ffff + ((b >> 20) & 1) - (120u << 23)) >> 20;
  uint32_t tiny = (uint32_t)rintf(a * 512.f);
  return (uint8_t)(sign | (x != x ? 0x7f : a < 0.015625f ? tiny : normal));
}
/* towards zero; in 16 bits the number next to another in that direction has the next lower bits */
T_INLINE float t_truncate_bf16(float x) { return x != x ? x : t_from_f32(t_raw_f32(x) & 0xffff0000u); }
T_INLINE float t_truncate_f16(float x) {
  uint16_t h = t_raw_f16(x);
  return t_from_f16((uint16_t)(h - (fabsf(t_from_f16(h)) > fabsf(x))));
}

T_INLINE float t_round_bf16(float x) { return t_bf16_f32(t_f32_bf16(x)); }
/* both formats of 8 bits saturate, infinities too, as the conversions of GPUs do */
T_INLINE float t_round_f8E5M2(float x) {
  return t_f8E5M2_f32(t_f32_f8E5M2(x > 57344.f ? 57344.f : x < -57344.f ? -57344.f : x));
}
T_INLINE float t_round_f8E4M3FN(float x) { return t_f8E4M3FN_f32(t_f32_f8E4M3FN(x)); }

T_INLINE uint16_t t_raw_bf16(float x) { return t_f32_bf16(x); }
T_INLINE float t_from_bf16(uint16_t x) { return t_bf16_f32(x); }
T_INLINE uint8_t t_raw_f8E5M2(float x) { return t_f32_f8E5M2(x); }
T_INLINE float t_from_f8E5M2(uint8_t x) { return t_f8E5M2_f32(x); }
T_INLINE uint8_t t_raw_f8E4M3FN(float x) { return t_f32_f8E4M3FN(x); }
T_INLINE float t_from_f8E4M3FN(uint8_t x) { return t_f8E4M3FN_f32(x); }

/* ---- integers */

/* gcc 12 vectorises a load at an index that is a comparison as if the vector of its bits were one of integers:
   the index must not look like one. Always 0, but only the linker could know */
int32_t t_nothing;
#define t_opaque(x) ((x) + t_nothing)

T_INLINE int t_clip(int64_t x, int64_t low, int64_t high) { return (int)(x < low ? low : x > high ? high : x); }
/* C divides as kernels expect but for two cases that stop the process: by 0 (gives 0 here), and MIN / -1 (wraps) */
#define T_DIVISIONS(ELEM, TYPE, UNSIGNED) \
  T_INLINE TYPE t_div_##ELEM(TYPE a, TYPE b) { return b == 0 ? 0 : b == -1 ? (TYPE)(0 - (UNSIGNED)a) : a / b; } \
  T_INLINE TYPE t_rem_##ELEM(TYPE a, TYPE b) { return b == 0 || b == -1 ? 0 : a % b; } \
  T_INLINE TYPE t_udiv_##ELEM(TYPE a, TYPE b) { return b == 0 ? 0 : (TYPE)((UNSIGNED)a / (UNSIGNED)b); } \
  T_INLINE TYPE t_urem_##ELEM(TYPE a, TYPE b) { return b == 0 ? 0 : (TYPE)((UNSIGNED)a % (UNSIGNED)b); }
T_DIVISIONS(i8, int8_t, uint8_t)
T_DIVISIONS(i16, int16_t, uint16_t)
T_DIVISIONS(i32, int32_t, uint32_t)
T_DIVISIONS(i64, int64_t, uint64_t)
T_INLINE int32_t t_mulhi_i32(int32_t a, int32_t b) { return (int32_t)(((uint64_t)(uint32_t)a * (uint32_t)b) >> 32); }
T_INLINE int64_t t_mulhi_i64(int64_t a, int64_t b) {
  return (int64_t)(((unsigned __int128)(uint64_t)a * (uint64_t)b) >> 64);
}

/* ---- reductions: those of OpenMP start at the largest finite number in clang */

#pragma omp declare reduction(t_max : float, double : omp_out = omp_out < omp_in ? omp_in : omp_out) \
  initializer(omp_priv = -INFINITY)
#pragma omp declare reduction(t_min : float, double : omp_out = omp_out > omp_in ? omp_in : omp_out) \
  initializer(omp_priv = INFINITY)

/* ---- functions of float, without branches so that loops over them vectorise

   largest errors in units in the last place: exp and exp2 1.0, log 0.8, log2 1.7, tanh 1.3, erf 2.5 */

/* 2^n for an integer -253 <= n <= 254, in two factors so that the ends become 0 and infinity gradually */
T_INLINE float t_scale(float x, int32_t n) {
  int32_t half = n >> 1;
  return x * t_from_f32((uint32_t)(half + 127) << 23) * t_from_f32((uint32_t)(n - half + 127) << 23);
}
/* e^f for |f| <= 0.35 */
T_INLINE float t_exp_core(float f) {
  float p = 1.990044199e-04f;
  p = p * f + 1.393454323e-03f; p = p * f + 8.333297067e-03f; p = p * f + 4.166645680e-02f;
  p = p * f + 1.666666672e-01f; p = p * f + 5.000000014e-01f;
  return 1.0f + (f + f * f * p);
}
T_INLINE float t_exp2(float x) {
  x = x < -151.f ? -151.f : x; x = x > 129.f ? 129.f : x;
  float n = rintf(x);
  return t_scale(t_exp_core((x - n) * 0.693147180559945f), (int32_t)n);
}
T_INLINE float t_exp(float x) {
  x = x < -105.f ? -105.f : x; x = x > 89.5f ? 89.5f : x;
  float n = rintf(x * 1.44269504088896f);
  return t_scale(t_exp_core((x - n * 0.693359375f) + n * 2.12194440e-4f), (int32_t)n);
}
T_INLINE float t_log(float x) {
  float y = x < 1.17549435e-38f ? x * 8388608.f : x;
  int32_t e = (int32_t)((t_raw_f32(y) - 0x3f3504f3u) >> 23);
  e = e > 255 ? e - 512 : e;
  float m = t_from_f32(t_raw_f32(y) - ((uint32_t)e << 23)) - 1.0f, n = (float)e - (x < 1.17549435e-38f ? 23.f : 0.f);
  float p = 7.0376836292e-2f, z = m * m;
  p = p * m - 1.1514610310e-1f; p = p * m + 1.1676998740e-1f; p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f; p = p * m - 1.6668057665e-1f; p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f; p = p * m + 3.3333331174e-1f;
  float r = (m + (m * z * p - 2.12194440e-4f * n - 0.5f * z)) + 0.693359375f * n;
  r = x == INFINITY ? INFINITY : r;
  r = x == 0.f ? -INFINITY : r;
  return x < 0.f || x != x ? NAN : r;
}
T_INLINE float t_log2(float x) { return t_log(x) * 1.44269504088896f; }
T_INLINE float t_erf(float x) {
  float a = fabsf(x), z = a * a, t = 1.0f / (1.0f + 0.5f * a);
  float p = -9.673591273e-06f, q = 1.200597530e-01f;
  p = p * z + 1.126825406e-04f; p = p * z - 8.484396575e-04f; p = p * z + 5.221053414e-03f;
  p = p * z - 2.686543831e-02f; p = p * z + 1.128378262e-01f; p = p * z - 3.761263848e-01f;
  p = p * z + 1.128379167e+00f;
  q = q * t - 4.737497518e-01f; q = q * t + 5.671387302e-01f; q = q * t - 1.068324620e-01f;
  q = q * t + 3.493894185e-01f; q = q * t + 2.592251767e-01f; q = q * t + 2.849863773e-01f;
  q = q * t - 1.591672750e-04f;
  float big = a > 4.f ? 1.0f : 1.0f - q * t_exp(-z), r = a < 1.f ? a * p : big;
  return x < 0.f ? -r : x != x ? x : r;
}
T_INLINE float t_tanh(float x) {
  float a = fabsf(x), z = x * x, p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f; p = p * z - 5.37397155531e-2f; p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  float big = 1.0f - 2.0f / (t_exp(2.0f * a) + 1.0f);
  return a < 0.625f ? x + x * z * p : x < 0.f ? -big : x != x ? x : big;
}
T_INLINE float t_sin(float x) { return sinf(x); }
T_INLINE float t_cos(float x) { return cosf(x); }
T_INLINE float t_log1p(float x) { return log1pf(x); }
T_INLINE float t_expm1(float x) { return expm1f(x); }
T_INLINE float t_absf(float x) { return fabsf(x); }
T_INLINE float t_floor(float x) { return floorf(x); }
T_INLINE float t_ceil(float x) { return ceilf(x); }

#define T_LIBM(NAME, FUNCTION) T_INLINE double t_##NAME##_f64(double x) { return FUNCTION(x); }
T_LIBM(exp, exp) T_LIBM(exp2, exp2) T_LIBM(log, log) T_LIBM(log2, log2) T_LIBM(sin, sin) T_LIBM(cos, cos)
T_LIBM(erf, erf) T_LIBM(tanh, tanh) T_LIBM(absf, fabs) T_LIBM(floor, floor) T_LIBM(ceil, ceil)
T_LIBM(log1p, log1p) T_LIBM(expm1, expm1)

#define t_clamp(x, low, high) ((x) < (low) ? (low) : (x) > (high) ? (high) : (x))
#define t_fmod(a, b) ((__typeof__(a))fmod(a, b))

T_CALL void t_assert_failed(const char* kernel, const char* line, const char* message) {
  fprintf(stderr, "kernel %s, %s: device_assert failed: %s\n", kernel, line, message);
  abort();
}

/* ---- atomics: sequentially consistent, which is more than any order that a kernel can ask for */

#define T_ATOMIC(NAME, MEMORY, REGISTER, LOAD, STORE, RESULT) \
  T_INLINE REGISTER NAME(void* p, REGISTER v) { \
    MEMORY before, after; REGISTER o; \
    __atomic_load((MEMORY*)p, &before, __ATOMIC_RELAXED); \
    do { o = LOAD(before); after = STORE(RESULT); } \
    while (!__atomic_compare_exchange((MEMORY*)p, &before, &after, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)); \
    return o; }
#define T_SAME(x) (x)
#define T_INT_ATOMICS(ELEM, TYPE, UNSIGNED) \
  T_ATOMIC(t_atomic_add_##ELEM, TYPE, TYPE, T_SAME, T_SAME, (TYPE)((UNSIGNED)o + (UNSIGNED)v)) \
  T_ATOMIC(t_atomic_max_##ELEM, TYPE, TYPE, T_SAME, T_SAME, o > v ? o : v) \
  T_ATOMIC(t_atomic_min_##ELEM, TYPE, TYPE, T_SAME, T_SAME, o < v ? o : v) \
  T_ATOMIC(t_atomic_umax_##ELEM, TYPE, TYPE, T_SAME, T_SAME, (UNSIGNED)o > (UNSIGNED)v ? o : v) \
  T_ATOMIC(t_atomic_umin_##ELEM, TYPE, TYPE, T_SAME, T_SAME, (UNSIGNED)o < (UNSIGNED)v ? o : v) \
  T_ATOMIC(t_atomic_and_##ELEM, TYPE, TYPE, T_SAME, T_SAME, o & v) \
  T_ATOMIC(t_atomic_or_##ELEM, TYPE, TYPE, T_SAME, T_SAME, o | v) \
  T_ATOMIC(t_atomic_xor_##ELEM, TYPE, TYPE, T_SAME, T_SAME, o ^ v)
#define T_EXCHANGES(ELEM, TYPE) \
  T_ATOMIC(t_atomic_exch_##ELEM, TYPE, TYPE, T_SAME, T_SAME, v) \
  T_INLINE TYPE t_atomic_cas_##ELEM(void* p, TYPE expected, TYPE v) { \
    __atomic_compare_exchange((TYPE*)p, &expected, &v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); return expected; }
T_INT_ATOMICS(i32, int32_t, uint32_t)
T_INT_ATOMICS(i64, int64_t, uint64_t)
/* compares bits, of floats too */
#define T_SWAPS(ELEM, REGISTER, LOAD, STORE) \
  T_INLINE REGISTER t_atomic_cas_##ELEM(void* p, REGISTER expected, REGISTER v) { \
    uint16_t e = STORE(expected), n = STORE(v); \
    __atomic_compare_exchange((uint16_t*)p, &e, &n, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); return LOAD(e); }
T_SWAPS(i16, int16_t, (int16_t), (uint16_t))
T_SWAPS(f16, float, t_from_f16, t_raw_f16)
T_SWAPS(bf16, float, t_from_bf16, t_raw_bf16)
T_EXCHANGES(i32, int32_t)
T_EXCHANGES(i64, int64_t)
T_EXCHANGES(f32, float)
T_EXCHANGES(f64, double)
T_ATOMIC(t_atomic_fadd_f32, float, float, T_SAME, T_SAME, o + v)
T_ATOMIC(t_atomic_fadd_f64, double, double, T_SAME, T_SAME, o + v)
T_ATOMIC(t_atomic_fadd_f16, uint16_t, float, t_from_f16, t_raw_f16, o + v)
T_ATOMIC(t_atomic_fadd_bf16, uint16_t, float, t_from_bf16, t_raw_bf16, o + v)

/* ---- vectors of floats */

typedef float t_vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef float t_vector8 __attribute__((vector_size(32)));
typedef float t_vector4 __attribute__((vector_size(16)));

T_INLINE float t_sum(t_vector v) {
  union { t_vector whole; t_vector8 half[2]; } a = {v};
  union { t_vector8 whole; t_vector4 half[2]; } b = {a.half[0] + a.half[1]};
  t_vector4 c = b.half[0] + b.half[1];
  return (c[0] + c[2]) + (c[1] + c[3]);
}
