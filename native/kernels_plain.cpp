#include "kernels.h"

#include <cmath>
#include <cstring>

namespace loraproxy {

float f16_to_f32(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1fu;
    uint32_t mantissa = h & 0x3ffu;
    uint32_t bits;
    if (exponent == 0x1fu) {
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else if (mantissa == 0) {
        bits = sign;
    } else { // subnormal: shift the leading one into place
        exponent = 113;
        while ((mantissa & 0x400u) == 0) {
            mantissa <<= 1;
            --exponent;
        }
        bits = sign | (exponent << 23) | ((mantissa & 0x3ffu) << 13);
    }
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

uint16_t f32_to_f16(float f) { // round to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) {
        return static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u));
    }
    if (magnitude >= 0x477ff000u) { // rounds to 2^16 or more
        return static_cast<uint16_t>(sign | 0x7c00u);
    }
    if (magnitude < 0x33000001u) { // at most half of the smallest subnormal
        return static_cast<uint16_t>(sign);
    }
    const int exponent = static_cast<int>(magnitude >> 23);
    uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const int shift = exponent >= 113 ? 13 : 126 - exponent;
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1);
    uint32_t value = exponent >= 113 ? (static_cast<uint32_t>(exponent - 112) << 10) + (kept - 0x400u) : kept;
    if (rest > half || (rest == half && (value & 1u))) {
        ++value;
    }
    return static_cast<uint16_t>(sign | value);
}

namespace plain {

struct vec { float v[4]; };
constexpr int LANES = 4;
constexpr int ROWS  = 1;

static inline vec zero() { return {{0.0f, 0.0f, 0.0f, 0.0f}}; }
static inline vec load(const float * p) { return {{p[0], p[1], p[2], p[3]}}; }
static inline vec load(const uint16_t * p) {
    return {{f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])}};
}
static inline vec load(const int8_t * p) {
    return {{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])}};
}
static inline void store_f16(uint16_t * p, vec v) {
    for (int i = 0; i < LANES; ++i) {
        p[i] = f32_to_f16(v.v[i]);
    }
}
static inline void store(float * p, vec v) { std::memcpy(p, v.v, sizeof v.v); }
static inline vec broadcast(float f) { return {{f, f, f, f}}; }
static inline vec madd(vec a, vec b, vec c) {
    for (int i = 0; i < LANES; ++i) {
        c.v[i] = a.v[i] * b.v[i] + c.v[i];
    }
    return c;
}
static inline vec mul(vec a, vec b) {
    for (int i = 0; i < LANES; ++i) {
        a.v[i] *= b.v[i];
    }
    return a;
}
static inline vec add(vec a, vec b) {
    for (int i = 0; i < LANES; ++i) {
        a.v[i] += b.v[i];
    }
    return a;
}
static inline float reduce(vec v) { return (v.v[0] + v.v[1]) + (v.v[2] + v.v[3]); }

#include "kernels_impl.h"

extern const Kernels kernels = {"plain", down, up, down, up, narrow, round};

} // namespace plain
} // namespace loraproxy
