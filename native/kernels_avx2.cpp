#include "kernels.h"

#include <cmath>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

namespace loraproxy {
namespace avx2 {

using vec = __m256;
constexpr int LANES = 8;
constexpr int ROWS  = 2;

static inline vec zero() { return _mm256_setzero_ps(); }
static inline vec load(const float * p) { return _mm256_loadu_ps(p); }
static inline vec load(const uint16_t * p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
static inline vec load(const int8_t * p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
static inline void store_f16(uint16_t * p, vec v) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
static inline void store(float * p, vec v) { _mm256_storeu_ps(p, v); }
static inline vec broadcast(float f) { return _mm256_set1_ps(f); }
static inline vec madd(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline float reduce(vec v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
    return _mm_cvtss_f32(s);
}

#include "kernels_impl.h"

extern const Kernels kernels = {"avx2", down, up, down, up, narrow, round};

} // namespace avx2
} // namespace loraproxy

#endif
