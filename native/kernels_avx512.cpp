#include "kernels.h"

#include <cmath>
#include <cstring>

#if defined(__AVX512F__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

namespace loraproxy {
namespace avx512 {

using vec = __m512;
constexpr int LANES = 16;
constexpr int ROWS  = 4;

static inline vec zero() { return _mm512_setzero_ps(); }
static inline vec load(const float * p) { return _mm512_loadu_ps(p); }
static inline vec load(const uint16_t * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
static inline vec load(const int8_t * p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
static inline void store_f16(uint16_t * p, vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
static inline void store(float * p, vec v) { _mm512_storeu_ps(p, v); }
static inline vec broadcast(float f) { return _mm512_set1_ps(f); }
static inline vec madd(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline float reduce(vec v) { return _mm512_reduce_add_ps(v); }

#include "kernels_impl.h"

extern const Kernels kernels = {"avx512", down, up, down, up, narrow, round};

} // namespace avx512
} // namespace loraproxy

#endif
