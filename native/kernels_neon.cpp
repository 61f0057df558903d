#include "kernels.h"

#include <cmath>
#include <cstring>

#if defined(__aarch64__) || defined(_M_ARM64)

#include <arm_neon.h>

namespace loraproxy {
namespace neon {

using vec = float32x4_t;
constexpr int LANES = 4;
constexpr int ROWS  = 2;

static inline vec zero() { return vdupq_n_f32(0.0f); }
static inline vec load(const float * p) { return vld1q_f32(p); }
static inline vec load(const uint16_t * p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline vec load(const int8_t * p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
static inline void store_f16(uint16_t * p, vec v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
static inline void store(float * p, vec v) { vst1q_f32(p, v); }
static inline vec broadcast(float f) { return vdupq_n_f32(f); }
static inline vec madd(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
static inline vec mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec add(vec a, vec b) { return vaddq_f32(a, b); }
static inline float reduce(vec v) { return vaddvq_f32(v); }

#include "kernels_impl.h"

extern const Kernels kernels = {"neon", down, up, down, up, narrow, round};

} // namespace neon
} // namespace loraproxy

#endif
