// The formats are those of ggml-common.h in llama.cpp's source; only their layout is taken from there.
#include "base_product.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace loraproxy {
namespace avx2 {

namespace {

// 32 inputs of eight rows of W: q[i] holds inputs 4i .. 4i+3 of every row, a row a lane.
struct Tile {
    __m256i q[8];
};

inline __m128i load16(const uint8_t * p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
inline __m256i load32(const uint8_t * p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

// 4 x 8 dwords: rows r (low half) and r + 4 (high half) of 16 bytes each become dword i of every row
inline void transpose4(const uint8_t * const * p, __m256i * out) {
    const auto both = [&](int r) { return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(p[r])), load16(p[r + 4]), 1); };
    const __m256i a = both(0), b = both(1), c = both(2), d = both(3);
    const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
    const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
    out[0] = _mm256_unpacklo_epi64(ab0, cd0);
    out[1] = _mm256_unpackhi_epi64(ab0, cd0);
    out[2] = _mm256_unpacklo_epi64(ab1, cd1);
    out[3] = _mm256_unpackhi_epi64(ab1, cd1);
}

// 32 bytes of every row
inline void transpose8(const uint8_t * const * p, __m256i * out) {
    transpose4(p, out);
    const uint8_t * second[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; ++r) {
        second[r] = p[r] + 16;
    }
    transpose4(second, out + 4);
}

inline uint32_t load_u32(const uint8_t * p) {
    uint32_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline uint16_t load_u16(const uint8_t * p) {
    uint16_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// eight f16 values, one from each row
inline __m256 load_scales(const uint8_t * const * p) {
    return _mm256_cvtph_ps(_mm_setr_epi16(load_u16(p[0]), load_u16(p[1]), load_u16(p[2]), load_u16(p[3]), load_u16(p[4]),
                                          load_u16(p[5]), load_u16(p[6]), load_u16(p[7])));
}

// eight pairs of f16, as (first of each, second of each)
inline void load_scale_pairs(const uint8_t * const * p, __m256 & first, __m256 & second) {
    const __m256i v = _mm256_setr_epi32(load_u32(p[0]), load_u32(p[1]), load_u32(p[2]), load_u32(p[3]), load_u32(p[4]),
                                        load_u32(p[5]), load_u32(p[6]), load_u32(p[7]));
    const __m256i low  = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    const __m256i high = _mm256_srli_epi32(v, 16);
    const __m256i both = _mm256_packus_epi32(low, high); // low 0-3, high 0-3, low 4-7, high 4-7
    const __m256i order = _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0));
    first  = _mm256_cvtph_ps(_mm256_castsi256_si128(order));
    second = _mm256_cvtph_ps(_mm256_extracti128_si256(order, 1));
}

inline __m256i x4(const int8_t * x, int i) {
    int32_t v;
    std::memcpy(&v, x + 4 * i, sizeof v);
    return _mm256_set1_epi32(v);
}

inline __m256i widen(__m256i sums16) { return _mm256_madd_epi16(sums16, _mm256_set1_epi16(1)); }

// Weights of at most 4 bits: 8 * 2 * 15 * 127 fits in 16.
inline __m256i dot_4bit(const __m256i * q, const int8_t * x) {
    __m256i sum = _mm256_maddubs_epi16(q[0], x4(x, 0));
    for (int i = 1; i < 8; ++i) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(q[i], x4(x, i)));
    }
    return widen(sum);
}

// The inputs [4 first, 4 first + 16) and weights of at most 6 bits: 2 * 2 * 63 * 127 fits in 16.
inline __m256i dot_6bit_half(const __m256i * q, const int8_t * x, int first) {
    const auto pair = [&](int i) {
        return _mm256_add_epi16(_mm256_maddubs_epi16(q[i], x4(x, i)), _mm256_maddubs_epi16(q[i + 1], x4(x, i + 1)));
    };
    return _mm256_add_epi32(widen(pair(first)), widen(pair(first + 2)));
}

inline __m256i dot_5bit(const __m256i * q, const int8_t * x) {
    const auto four = [&](int i) { // 4 * 2 * 31 * 127 fits in 16
        const __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(q[i], x4(x, i)), _mm256_maddubs_epi16(q[i + 1], x4(x, i + 1)));
        return _mm256_add_epi16(
            a, _mm256_add_epi16(_mm256_maddubs_epi16(q[i + 2], x4(x, i + 2)), _mm256_maddubs_epi16(q[i + 3], x4(x, i + 3))));
    };
    return _mm256_add_epi32(widen(four(0)), widen(four(4)));
}

inline __m256i dot_signed(const __m256i * q, const int8_t * x) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 8; ++i) { // |q| is unsigned, its sign goes over to x: 2 * 128 * 127 fits in 16
        sum = _mm256_add_epi32(sum, widen(_mm256_maddubs_epi16(_mm256_abs_epi8(q[i]), _mm256_sign_epi8(x4(x, i), q[i]))));
    }
    return sum;
}

inline __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline __m256i high_nibbles(__m256i v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }

using Rows = const uint8_t * [TILE_ROWS];

inline void advanced(const uint8_t * const * rows, size_t bytes, Rows & to) {
    for (int r = 0; r < TILE_ROWS; ++r) {
        to[r] = rows[r] + bytes;
    }
}

// A tile's rows are read side by side, which the processor's own prefetching does not foresee; this many tiles
// ahead it is told.
constexpr size_t AHEAD = 2;

// Every format: begin() reads what BYTES bytes of each row have in common, load(part) unpacks BLOCKS blocks of 32 inputs
// of them into tiles, and add() adds one block's product with one row of x to its accumulator.

struct Q4_0 {
    static constexpr int PARTS = 1, BLOCKS = 1, BYTES = 18;
    Tile   tile;
    __m256 d, m;

    void begin(const uint8_t * const * rows) {
        d = load_scales(rows);
        m = _mm256_mul_ps(d, _mm256_set1_ps(-8.0f));
    }

    void load(const uint8_t * const * rows, int) { unpack(rows, 2); }

    void unpack(const uint8_t * const * rows, size_t offset) {
        Rows at;
        advanced(rows, offset, at);
        __m256i packed[4];
        transpose4(at, packed);
        for (int i = 0; i < 4; ++i) {
            tile.q[i]     = low_nibbles(packed[i]);
            tile.q[i + 4] = high_nibbles(packed[i]);
        }
    }

    __m256 add(int, const int8_t * x, float xd, float s0, float s1, __m256 acc) const {
        acc = _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_set1_ps(xd)), _mm256_cvtepi32_ps(dot_4bit(tile.q, x)), acc);
        return _mm256_fmadd_ps(m, _mm256_set1_ps(s0 + s1), acc);
    }
};

struct Q4_1 : Q4_0 {
    static constexpr int PARTS = 1, BLOCKS = 1, BYTES = 20;

    void begin(const uint8_t * const * rows) { load_scale_pairs(rows, d, m); }
    void load(const uint8_t * const * rows, int) { unpack(rows, 4); }
};

struct Q8_0 {
    static constexpr int PARTS = 1, BLOCKS = 1, BYTES = 34;
    Tile   tile;
    __m256 d;

    void begin(const uint8_t * const * rows) { d = load_scales(rows); }

    void load(const uint8_t * const * rows, int) {
        Rows at;
        advanced(rows, 2, at);
        transpose8(at, tile.q);
    }

    __m256 add(int, const int8_t * x, float xd, float, float, __m256 acc) const {
        return _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_set1_ps(xd)), _mm256_cvtepi32_ps(dot_signed(tile.q, x)), acc);
    }
};

// Byte j % 4 of the dwords of eight rows, as floats.
inline __m256 unsigned_byte(__m256i v, int j) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v, 8 * (j % 4)), _mm256_set1_epi32(255)));
}
inline __m256 signed_byte(__m256i v, int j) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * (j % 4)), 24));
}

// The scales and mins of the eight blocks of Q4_K and Q5_K, six bits each, packed in 12 bytes.
struct KScales {
    __m256 d[8], m[8];

    void load(const uint8_t * const * rows) {
        __m256 super_d, super_m;
        load_scale_pairs(rows, super_d, super_m);
        Rows at;
        advanced(rows, 4, at);
        __m256i       v[4]; // the fourth is not of the scales
        transpose4(at, v);
        const __m256i six = _mm256_set1_epi8(63), four = _mm256_set1_epi8(15), top = _mm256_set1_epi8(0x30);
        const auto    rest = [&](__m256i u) { return _mm256_and_si256(_mm256_srli_epi32(u, 2), top); };
        const __m256i scale[2] = {_mm256_and_si256(v[0], six), _mm256_or_si256(_mm256_and_si256(v[2], four), rest(v[0]))};
        const __m256i min[2]   = {_mm256_and_si256(v[1], six),
                                  _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(v[2], 4), four), rest(v[1]))};
        super_m = _mm256_xor_ps(super_m, _mm256_set1_ps(-0.0f)); // mins are subtracted
        for (int j = 0; j < 8; ++j) {
            d[j] = _mm256_mul_ps(super_d, unsigned_byte(scale[j / 4], j));
            m[j] = _mm256_mul_ps(super_m, unsigned_byte(min[j / 4], j));
        }
    }
};

struct Q4_K {
    static constexpr int PARTS = 4, BLOCKS = 2, BYTES = 144;
    Tile    tile[2];
    KScales scales;

    void begin(const uint8_t * const * rows) { scales.load(rows); }

    void load(const uint8_t * const * rows, int part) {
        Rows at;
        advanced(rows, 16 + 32 * part, at);
        __m256i packed[8];
        transpose8(at, packed);
        for (int i = 0; i < 8; ++i) {
            tile[0].q[i] = low_nibbles(packed[i]);
            tile[1].q[i] = high_nibbles(packed[i]);
        }
    }

    __m256 add(int j, const int8_t * x, float xd, float s0, float s1, __m256 acc) const {
        const __m256i sum = dot_4bit(tile[j % BLOCKS].q, x);
        acc = _mm256_fmadd_ps(_mm256_mul_ps(scales.d[j], _mm256_set1_ps(xd)), _mm256_cvtepi32_ps(sum), acc);
        return _mm256_fmadd_ps(scales.m[j], _mm256_set1_ps(s0 + s1), acc);
    }
};

struct Q5_K {
    static constexpr int PARTS = 4, BLOCKS = 2, BYTES = 176;
    Tile    tile[2];
    KScales scales;
    __m256i fifth[8]; // bit j of byte l: the fifth bit of input l of block j

    void begin(const uint8_t * const * rows) {
        scales.load(rows);
        Rows at;
        advanced(rows, 16, at);
        transpose8(at, fifth);
    }

    void load(const uint8_t * const * rows, int part) {
        Rows at;
        advanced(rows, 48 + 32 * part, at);
        __m256i packed[8];
        transpose8(at, packed);
        const __m256i one = _mm256_set1_epi8(1);
        for (int i = 0; i < 8; ++i) {
            const __m256i low  = _mm256_and_si256(_mm256_srli_epi16(fifth[i], 2 * part), one);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(fifth[i], 2 * part + 1), one);
            tile[0].q[i] = _mm256_or_si256(low_nibbles(packed[i]), _mm256_slli_epi16(low, 4));
            tile[1].q[i] = _mm256_or_si256(high_nibbles(packed[i]), _mm256_slli_epi16(high, 4));
        }
    }

    __m256 add(int j, const int8_t * x, float xd, float s0, float s1, __m256 acc) const {
        const __m256i sum = dot_5bit(tile[j % BLOCKS].q, x);
        acc = _mm256_fmadd_ps(_mm256_mul_ps(scales.d[j], _mm256_set1_ps(xd)), _mm256_cvtepi32_ps(sum), acc);
        return _mm256_fmadd_ps(scales.m[j], _mm256_set1_ps(s0 + s1), acc);
    }
};

struct Q6_K {
    static constexpr int PARTS = 2, BLOCKS = 4, BYTES = 210;
    Tile   tile[4];
    __m256 d[16]; // of each half block

    void begin(const uint8_t * const * rows) {
        Rows at;
        advanced(rows, 208, at);
        const __m256 super_d = load_scales(at);
        advanced(rows, 192, at);
        __m256i scale[4];
        transpose4(at, scale);
        for (int j = 0; j < 16; ++j) {
            d[j] = _mm256_mul_ps(super_d, signed_byte(scale[j / 4], j));
        }
    }

    void load(const uint8_t * const * rows, int part) {
        __m256i a[8], b[8], high[8];
        Rows    at;
        advanced(rows, 64 * part, at);
        transpose8(at, a);
        advanced(rows, 64 * part + 32, at);
        transpose8(at, b);
        advanced(rows, 128 + 32 * part, at);
        transpose8(at, high);
        const __m256i two = _mm256_set1_epi8(3);
        for (int i = 0; i < 8; ++i) {
            const auto bits = [&](int shift) {
                return _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(high[i], shift), two), 4);
            };
            tile[0].q[i] = _mm256_or_si256(low_nibbles(a[i]), bits(0));
            tile[1].q[i] = _mm256_or_si256(low_nibbles(b[i]), bits(2));
            tile[2].q[i] = _mm256_or_si256(high_nibbles(a[i]), bits(4));
            tile[3].q[i] = _mm256_or_si256(high_nibbles(b[i]), bits(6));
        }
    }

    __m256 add(int j, const int8_t * x, float xd, float s0, float s1, __m256 acc) const {
        acc = half(d[2 * j], dot_6bit_half(tile[j % BLOCKS].q, x, 0), xd, s0, acc);
        return half(d[2 * j + 1], dot_6bit_half(tile[j % BLOCKS].q, x, 4), xd, s1, acc);
    }

    static __m256 half(__m256 d, __m256i sum, float xd, float s, __m256 acc) {
        acc = _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_set1_ps(xd)), _mm256_cvtepi32_ps(sum), acc);
        return _mm256_fmadd_ps(d, _mm256_set1_ps(-32.0f * s), acc); // the stored values are 32 too large
    }
};

template <class Format>
void product(const uint8_t * w, size_t row_bytes, int n_tile, const Activations & x, int first, int n,
             float * const * out) {
    Rows rows;
    for (int r = 0; r < TILE_ROWS; ++r) { // the last tile's missing rows repeat its last one
        rows[r] = w + row_bytes * static_cast<size_t>(r < n_tile ? r : n_tile - 1);
    }
    __m256 acc[BATCH_ROWS];
    for (int i = 0; i < n; ++i) {
        acc[i] = _mm256_setzero_ps();
    }
    const int       blocks = x.n_in / BLOCK;
    const size_t    stride = static_cast<size_t>(x.n_in);
    const uint8_t * ahead  = w + AHEAD * TILE_ROWS * row_bytes;
    for (int b = 0; b < blocks; b += Format::PARTS * Format::BLOCKS) {
        for (int line = 0; line < TILE_ROWS * Format::BYTES; line += 64) {
            _mm_prefetch(reinterpret_cast<const char *>(ahead + line), _MM_HINT_T0);
        }
        ahead += TILE_ROWS * Format::BYTES;
        Format format;
        format.begin(rows);
        for (int part = 0; part < Format::PARTS; ++part) {
            format.load(rows, part);
            for (int j = part * Format::BLOCKS; j < (part + 1) * Format::BLOCKS; ++j) {
                const int8_t * xq = x.q.data() + first * stride + static_cast<size_t>(b + j) * BLOCK;
                const float *  xd = x.d.data() + static_cast<size_t>(b + j) * x.n_rows + first;
                const float *  xs = x.s.data() + static_cast<size_t>(b + j) * 2 * x.n_rows + first;
                for (int i = 0; i < n; ++i) {
                    acc[i] = format.add(j, xq + i * stride, xd[i], xs[i], xs[i + x.n_rows], acc[i]);
                }
            }
        }
        advanced(rows, Format::BYTES, rows);
    }
    for (int i = 0; i < n; ++i) {
        if (n_tile == TILE_ROWS) {
            _mm256_storeu_ps(out[i], acc[i]);
        } else {
            alignas(32) float values[TILE_ROWS];
            _mm256_store_ps(values, acc[i]);
            std::memcpy(out[i], values, sizeof(float) * static_cast<size_t>(n_tile));
        }
    }
}

void quantize(const float * x, Activations & to, int row) {
    const int  blocks = to.n_in / BLOCK;
    int8_t *   q      = to.q.data() + static_cast<size_t>(row) * to.n_in;
    const auto n      = static_cast<size_t>(to.n_rows);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (int b = 0; b < blocks; ++b, x += BLOCK, q += BLOCK) {
        __m256 v[4], largest = _mm256_setzero_ps(), no_number = _mm256_setzero_ps();
        for (int i = 0; i < 4; ++i) {
            v[i]      = _mm256_loadu_ps(x + 8 * i);
            largest   = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v[i]));
            no_number = _mm256_or_ps(no_number, _mm256_cmp_ps(v[i], v[i], _CMP_UNORD_Q)); // lost by max
        }
        __m128 m = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
        m        = _mm_max_ps(m, _mm_movehl_ps(m, m));
        m        = _mm_max_ss(m, _mm_movehdup_ps(m));
        const float  d       = _mm256_movemask_ps(no_number) ? NAN : _mm_cvtss_f32(m) / 127.0f;
        const __m256 inverse = _mm256_set1_ps(d > 0.0f ? 127.0f / _mm_cvtss_f32(m) : 0.0f);
        __m256i      words[4];
        for (int i = 0; i < 4; ++i) {
            words[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)); // to nearest, ties to even
        }
        const __m256i low16  = _mm256_packs_epi32(words[0], words[1]);
        const __m256i high16 = _mm256_packs_epi32(words[2], words[3]);
        const __m256i bytes  = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low16, high16),
                                                           _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(q), bytes);
        const auto sum = [](__m256i a, __m256i b) {
            const __m256i w = _mm256_add_epi32(a, b);
            __m128i       h = _mm_add_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
            h               = _mm_add_epi32(h, _mm_shuffle_epi32(h, _MM_SHUFFLE(1, 0, 3, 2)));
            h               = _mm_add_epi32(h, _mm_shuffle_epi32(h, _MM_SHUFFLE(2, 3, 0, 1)));
            return static_cast<float>(_mm_cvtsi128_si32(h));
        };
        to.d[static_cast<size_t>(b) * n + row]           = d;
        to.s[static_cast<size_t>(b) * 2 * n + row]       = d * sum(words[0], words[1]);
        to.s[(static_cast<size_t>(b) * 2 + 1) * n + row] = d * sum(words[2], words[3]);
    }
}

template <class Format> constexpr BaseProduct made() { return {quantize, product<Format>}; }

} // namespace

const BaseProduct * base_product(ggml_type type) {
    static constexpr BaseProduct q4_0 = made<Q4_0>(), q4_1 = made<Q4_1>(), q8_0 = made<Q8_0>(), q4_k = made<Q4_K>(),
                                 q5_k = made<Q5_K>(), q6_k = made<Q6_K>();
    switch (type) {
        case GGML_TYPE_Q4_0: return &q4_0;
        case GGML_TYPE_Q4_1: return &q4_1;
        case GGML_TYPE_Q8_0: return &q8_0;
        case GGML_TYPE_Q4_K: return &q4_k;
        case GGML_TYPE_Q5_K: return &q5_k;
        case GGML_TYPE_Q6_K: return &q6_k;
        default: return nullptr;
    }
}

} // namespace avx2
} // namespace loraproxy

#endif
