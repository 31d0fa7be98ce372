// Optimizer updates, the gradient norm, the decisions of a step, and 8- and 4-bit codes on a CUDA device.
//
// `device_kernels.py` compiles this file at run time and launches the kernels. The optimizers' kernels have the names
// of the host's loops in `updates.py`. All kernels give the same bits as the host's loops: the same operations in the
// same order, each with one rounding. So every float64 operation is an intrinsic that rounds to nearest, which a
// compiler may not contract into an FMA, and every float32 operation is an instruction of the section "float32". The
// sign and payload of a NaN may differ.
//
// A thread block has THREADS threads. `kind` is the dtype of an array: FLOAT32, BFLOAT16, FLOAT16 or, of codes, BYTE.
// `cupy_kernels.py` compiles a kernel for the values of its FIXED parameters that a launch has: they are constants.
// `control` may be null: then the kernel multiplies gradients by `factor`, and the update applies.
//
// The memory limits most kernels. Threads take four elements at once where addresses allow it, or eight of 16 bits
// (WIDTH is 4 or 8, else 1), and load all their arrays before they compute.
//
// The file includes no headers, so that NVRTC needs none; the tests also compile it as C++ for the host.

#define THREADS 256
#define WARPS 8
#define ITEMS 4 /* elements per thread of an update; a thread loads them all before it computes */
#define FULL_WARP 0xffffffffu
#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2
#define BYTE 3
#define INFINITY_BITS 0x7f800000u
#define NAN_BITS 0x7fc00000u
#define SCALE_FLOOR_BITS 0x03800000u /* 2**-120, `kernels.SCALE_FLOOR` */
#define SUM_BITS 25                  /* `kernels.NORM_BITS` */
#define BLOCK 32                     /* `updates.BLOCK_NUMEL`: a block of 8-bit moments */
#define FIXED int

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- float32 ----
//
// CuPy adds `-ftz=true` after the options that it gets, and NVRTC follows the last one. Operators, intrinsics,
// comparisons and conversions of float32 would then replace subnormal numbers by zeros, unlike the host. Only
// instructions written as PTX do not depend on options. Bits become floats by PTX, too: from a cleared sign bit the
// compiler makes an absolute value, which flushes. The tests' `cuda_on_host.h` has these functions for the host.

#ifdef __CUDACC_RTC__
#define ROUNDED(name, instruction)                                                 \
    __device__ __forceinline__ float name(float a, float b) {                      \
        float result;                                                              \
        asm(instruction " %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));           \
        return result;                                                             \
    }

ROUNDED(add_rn, "add.rn.f32")
ROUNDED(sub_rn, "sub.rn.f32")
ROUNDED(mul_rn, "mul.rn.f32")
ROUNDED(div_rn, "div.rn.f32")

__device__ __forceinline__ float sqrt_rn(float value) {
    float root;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(value));
    return root;
}

__device__ __forceinline__ float float_of_bits(u32 bits) {
    float value;
    asm("mov.b32 %0, %1;" : "=f"(value) : "r"(bits));
    return value;
}

__device__ __forceinline__ u32 bits_of_float(float value) {
    u32 bits;
    asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ double widen(float value) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
    return wide;
}

__device__ __forceinline__ float narrow_rn(double value) {
    float narrow;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(value));
    return narrow;
}

__device__ __forceinline__ bool is_less(float a, float b) {
    u32 less;
    asm("set.lt.u32.f32 %0, %1, %2;" : "=r"(less) : "f"(a), "f"(b));
    return less;
}
#endif

__device__ __forceinline__ bool is_zero(float value) { return !(bits_of_float(value) & 0x7fffffffu); }

// ---- number formats ----

struct alignas(16) Words {
    u32 at[4];
};

__device__ __forceinline__ int size_of(int kind) { return kind == FLOAT32 ? 4 : kind == BYTE ? 1 : 2; }

__device__ __forceinline__ u32 load_raw(const void* array, i64 index, int kind) {
    if (kind == FLOAT32) return ((const u32*)array)[index];
    return kind == BYTE ? ((const u8*)array)[index] : ((const u16*)array)[index];
}

// Returns true if `width` elements from a multiple of it can be loaded at once; a null array can. Eight bytes of codes
// are loaded in two parts, since scales of 4 bytes are before them.
__device__ __forceinline__ bool takes(int width, const void* array, int kind) {
    return (u64)array % (kind == BYTE ? 4 : width * size_of(kind)) == 0;
}

// Loads WIDTH elements, packed: four or eight at once, of at most 16 bytes, or one, which is 0 beyond the end.
template <int WIDTH>
__device__ __forceinline__ Words load(const void* array, i64 first, i64 end, int kind) {
    Words packed = {};
    const void* place = (const char*)array + first * size_of(kind);
    if (WIDTH == 1) {
        if (first < end) packed.at[0] = load_raw(array, first, kind);
    } else if (kind == BYTE) {
#pragma unroll
        for (int k = 0; k < WIDTH / 4; ++k) packed.at[k] = ((const u32*)place)[k];
    } else if (kind == FLOAT32 || WIDTH == 8) {
        packed = *(const Words*)place;
    } else {
        u64 two = *(const u64*)place;
        packed.at[0] = (u32)two;
        packed.at[1] = (u32)(two >> 32);
    }
    return packed;
}

// Returns the pattern of element k.
__device__ __forceinline__ u32 raw_of(const Words& packed, int k, int kind) {
    if (kind == FLOAT32) return packed.at[k % 4];
    return kind == BYTE ? packed.at[k / 4] >> 8 * (k % 4) & 0xffu : packed.at[k / 2] >> 16 * (k % 2) & 0xffffu;
}

// Stores WIDTH patterns as `load` loads them, or one, unless it is beyond the end.
template <int WIDTH>
__device__ __forceinline__ void store_raws(void* array, i64 first, i64 end, const u32 (&raws)[WIDTH], int kind) {
    void* place = (char*)array + first * size_of(kind);
    if (WIDTH == 1) {
        if (first >= end) return;
        if (kind == FLOAT32) {
            *(u32*)place = raws[0];
        } else if (kind == BYTE) {
            *(u8*)place = (u8)raws[0];
        } else {
            *(u16*)place = (u16)raws[0];
        }
        return;
    }
    Words packed = {};
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        if (kind == FLOAT32) {
            packed.at[k % 4] = raws[k];
        } else if (kind == BYTE) {
            packed.at[k / 4] |= raws[k] << 8 * (k % 4);
        } else {
            packed.at[k / 2] |= raws[k] << 16 * (k % 2);
        }
    }
    if (kind == BYTE) {
#pragma unroll
        for (int k = 0; k < WIDTH / 4; ++k) ((u32*)place)[k] = packed.at[k];
    } else if (kind == FLOAT32 || WIDTH == 8) {
        *(Words*)place = packed;
    } else {
        *(u64*)place = packed.at[0] | (u64)packed.at[1] << 32;
    }
}

__device__ __forceinline__ u32 float16_to_bits(u32 half) {
    u32 magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    // In [0.5, 1) a float32's last place is that of a subnormal number.
    u32 subnormal = bits_of_float(sub_rn(float_of_bits(0x3f000000u | magnitude), 0.5f));
    u32 normal = (magnitude << 13) + (magnitude < 0x7c00u ? (127u - 15u) << 23 : (255u - 31u) << 23);
    return sign | (magnitude < 0x0400u ? subnormal : normal);
}

// Returns the bits of the float32 value of a loaded pattern.
__device__ __forceinline__ u32 bits_of_raw(u32 raw, int kind) {
    return kind == FLOAT32 ? raw : kind == BFLOAT16 ? raw << 16 : float16_to_bits(raw);
}

__device__ __forceinline__ float number_of(u32 raw, int kind) { return float_of_bits(bits_of_raw(raw, kind)); }

__device__ __forceinline__ u16 encode_bfloat16(u32 bits) {
    u32 quiet_nan = (bits >> 16) | 0x40u, number = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (u16)((bits & 0x7fffffffu) > INFINITY_BITS ? quiet_nan : number);
}

__device__ __forceinline__ u16 encode_float16(u32 bits) {
    u32 magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    u32 normal = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
    // In [0.5, 1) a float32's last place is 2**-24, as in a subnormal float16, so the addition rounds.
    u32 subnormal = bits_of_float(add_rn(float_of_bits(magnitude), 0.5f)) - 0x3f000000u;
    u32 number = magnitude < (127u - 14u) << 23 ? subnormal : normal;
    u32 beyond = magnitude > INFINITY_BITS ? 0x7e00u : 0x7c00u;
    return (u16)(sign | (magnitude >= (127u + 16u) << 23 ? beyond : number));
}

__device__ __forceinline__ u32 encode_number(float value, int kind) {
    u32 bits = bits_of_float(value);
    return kind == FLOAT32 ? bits : kind == BFLOAT16 ? encode_bfloat16(bits) : encode_float16(bits);
}

// Decodes the packed elements, with one decision for all.
template <int WIDTH>
__device__ __forceinline__ void numbers_of(const Words& packed, int kind, float (&numbers)[WIDTH]) {
    auto decode_all = [&](int kind) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) numbers[k] = number_of(raw_of(packed, k, kind), kind);
    };
    if (kind == FLOAT32) {
        decode_all(FLOAT32);
    } else if (kind == BFLOAT16) {
        decode_all(BFLOAT16);
    } else {
        decode_all(FLOAT16);
    }
}

template <int WIDTH>
__device__ __forceinline__ void store(void* array, i64 first, i64 end, const float (&values)[WIDTH], int kind) {
    auto store_all = [&](int kind) {
        u32 raws[WIDTH];
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) raws[k] = encode_number(values[k], kind);
        store_raws(array, first, end, raws, kind);
    };
    if (kind == FLOAT32) {
        store_all(FLOAT32);
    } else if (kind == BFLOAT16) {
        store_all(BFLOAT16);
    } else {
        store_all(FLOAT16);
    }
}

// ---- stochastic rounding and 8-bit blocks: the notes of that name in `updates.py` ----

__device__ __forceinline__ u32 random_bits(float weight, float moment, u32 key) {
    u32 seed = bits_of_float(weight) ^ (bits_of_float(moment) * 0x9e3779b9u) ^ key;
    seed = (seed ^ (seed >> 16)) * 0x7feb352du;
    seed = (seed ^ (seed >> 15)) * 0x846ca68bu;
    return seed ^ (seed >> 16);
}

__device__ __forceinline__ u32 encode_moment(float value, u32 random, int kind) {
    u32 bits = bits_of_float(value);
    bool finite = (bits & INFINITY_BITS) < INFINITY_BITS;
    return kind == FLOAT32 ? bits : finite ? (bits + (random & 0xffffu)) >> 16 : encode_bfloat16(bits);
}

__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }

__device__ __forceinline__ u32 warp_max(u32 value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, value);
#else
    for (int distance = 16; distance; distance >>= 1) {
        value = larger(value, __shfl_xor_sync(FULL_WARP, value, distance));
    }
    return value;
#endif
}

// Returns the bits of a block's smallest normal magnitude; all ones for a block that is not finite.
__device__ __forceinline__ u32 lowest_of(u32 exponent, u32 reach) {
    return exponent == 255u ? 0xffffffffu : (exponent - reach + 1u) << 23;
}

__device__ __forceinline__ u32 decode_magnitude(u32 code, u32 lowest) {
    u32 steps = (code << 20) + lowest, subnormal = bits_of_float(sub_rn(float_of_bits(steps), float_of_bits(lowest)));
    return code < 8u ? subnormal : steps - 0x800000u;
}

__device__ __forceinline__ u32 encode_magnitude(u32 bits, u32 lowest, u32 random) {
    u32 small = bits_of_float(add_rn(float_of_bits(bits), float_of_bits(lowest))) - lowest;
    u32 steps = bits < lowest ? small : bits - (lowest - 0x800000u);
    return (steps + ((random & 0xffffu) << 4)) >> 20;
}

__device__ __forceinline__ float decode_signed(u32 code, u32 exponent) {
    u32 lowest = lowest_of(exponent, 15u), magnitude = decode_magnitude(code & 0x7fu, lowest);
    return float_of_bits(lowest == 0xffffffffu ? NAN_BITS : magnitude | (code & 0x80u) << 24);
}

__device__ __forceinline__ float decode_unsigned(u32 code, u32 exponent) {
    u32 lowest = lowest_of(exponent, 31u), magnitude = decode_magnitude(code, lowest);
    return float_of_bits(lowest == 0xffffffffu ? NAN_BITS : magnitude);
}

// Returns the exponent byte of a block, whose lanes have WIDTH values each.
template <int WIDTH> __device__ __forceinline__ u32 block_exponent(const float (&values)[WIDTH]) {
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) largest = larger(largest, bits_of_float(values[k]) & 0x7fffffffu);
#pragma unroll
    for (int distance = BLOCK / WIDTH / 2; distance; distance >>= 1) {
        largest = larger(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
    }
    u32 exponent = (largest + 0xfffffu) >> 23;
    return exponent >= 254u ? 255u : exponent < 40u ? 40u : exponent;
}

__device__ __forceinline__ u8 encode_signed(float value, u32 exponent, u32 random) {
    u32 bits = bits_of_float(value), lowest = lowest_of(exponent, 15u);
    u32 code = encode_magnitude(bits & 0x7fffffffu, lowest, random);
    return lowest == 0xffffffffu ? 0 : (u8)((code & 0x7fu) | ((bits >> 24) & 0x80u));
}

__device__ __forceinline__ u8 encode_unsigned(float value, u32 exponent, u32 random) {
    u32 bits = bits_of_float(value), lowest = lowest_of(exponent, 31u);
    u32 code = encode_magnitude(bits, lowest, random);
    if (code == 0u && bits > 0u) code = 1u;
    return lowest == 0xffffffffu ? 0 : (u8)code;
}

// ---- optimizer updates: the host's loops document the formulas ----
//
// A thread updates four consecutive elements; or four one by one, at the end of the arrays and if an array does not
// begin at a multiple of four elements. The warp synchronizes (`__syncwarp`) after the arithmetic of each. Without it
// the compiler duplicates all later code for each path through a division or a root, and takes a second per kernel.

// Reads the factor from the control; returns true if the update applies.
__device__ __forceinline__ bool applies(const float* control, float* factor) {
    if (!control) return true;
    *factor = control[0];
    return is_less(0.0f, control[1]);
}

template <int value> struct Constant {
    __device__ constexpr operator int() const { return value; }
};

// Calls `use(width, first)` for the thread's elements from `first`: once for four, or four times for one.
template <class Use> __device__ __forceinline__ void for_items(i64 numel, bool aligned, Use use) {
    i64 begin = (i64)blockIdx.x * (THREADS * ITEMS);
    if (aligned && begin + THREADS * ITEMS <= numel) {
        use(Constant<ITEMS>(), begin + threadIdx.x * ITEMS);
    } else {
#pragma unroll 1
        for (int k = 0; k < ITEMS; ++k) use(Constant<1>(), begin + k * THREADS + threadIdx.x);
    }
}

// What all updates have: an element's master, its states, and the scaled gradient go to `rule`, which changes the first
// two and returns the value that `out` gets.
template <int COUNT, class Rule>
__device__ __forceinline__ void update(
    float* master, void* const (&states)[COUNT], const void* grad, void* out, const float* control, float factor,
    u32 key, i64 numel, int grad_kind, int moment_kind, int out_kind, Rule rule) {
    if (!applies(control, &factor)) return;
    bool aligned = takes(4, master, FLOAT32) && takes(4, grad, grad_kind) && takes(4, out, out_kind);
#pragma unroll
    for (int s = 0; s < COUNT; ++s) aligned = aligned && takes(4, states[s], moment_kind);
    auto run = [&](auto moment_kind) {
        for_items(numel, aligned, [&](auto width, i64 first) {
            constexpr int WIDTH = width;
            Words packed[COUNT], xs = load<WIDTH>(master, first, numel, FLOAT32);
#pragma unroll
            for (int s = 0; s < COUNT; ++s) {
                packed[s] = {};
                if (states[s]) packed[s] = load<WIDTH>(states[s], first, numel, moment_kind);
            }
            Words gs = load<WIDTH>(grad, first, numel, grad_kind);
            float grads[WIDTH], outs[WIDTH];
            numbers_of(gs, grad_kind, grads);
            u32 masters[WIDTH], raws[COUNT][WIDTH];
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                float x = float_of_bits(xs.at[k]), before = x, state[COUNT];
#pragma unroll
                for (int s = 0; s < COUNT; ++s) state[s] = number_of(raw_of(packed[s], k, moment_kind), moment_kind);
                outs[k] = rule(x, state, mul_rn(grads[k], factor));
                masters[k] = bits_of_float(x);
                u32 random = random_bits(before, state[0], key);
#pragma unroll
                for (int s = 0; s < COUNT; ++s) raws[s][k] = encode_moment(state[s], random >> 16 * s, moment_kind);
                __syncwarp();
            }
#pragma unroll
            for (int s = 0; s < COUNT; ++s) {
                if (states[s]) store_raws(states[s], first, numel, raws[s], moment_kind);
            }
            store_raws(master, first, numel, masters, FLOAT32);
            if (out) store(out, first, numel, outs, out_kind);
        });
    };
    if (moment_kind == FLOAT32) {
        run(Constant<FLOAT32>());
    } else {
        run(Constant<BFLOAT16>());
    }
}

struct Adam {
    float decay, l2, weight1, beta2, weight2, inverse_root, eps, negative_step;

    // Advances x, m and v by the scaled gradient plus the L2 term.
    __device__ __forceinline__ float operator()(float& x, float* moments, float scaled) const {
        float d = add_rn(scaled, mul_rn(l2, x)), &m = moments[0], &v = moments[1];
        m = add_rn(m, mul_rn(weight1, sub_rn(d, m)));
        v = add_rn(mul_rn(v, beta2), mul_rn(mul_rn(weight2, d), d));
        float below = add_rn(mul_rn(sqrt_rn(v), inverse_root), eps);
        return x = add_rn(mul_rn(x, decay), div_rn(mul_rn(negative_step, m), below));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) adam(
    float* master, void* exp_avg, void* exp_avg_sq, const void* grad, void* out, const float* control, float factor,
    u32 key, float decay, float l2, float weight1, float beta2, float weight2, float inverse_root, float eps,
    float negative_step, i64 numel, FIXED grad_kind, FIXED moment_kind, FIXED out_kind) {
    const Adam rule = {decay, l2, weight1, beta2, weight2, inverse_root, eps, negative_step};
    update(
        master, {exp_avg, exp_avg_sq}, grad, out, control, factor, key, numel, grad_kind, moment_kind, out_kind, rule);
}

extern "C" __global__ void __launch_bounds__(THREADS) adam_blocks(
    float* master, u8* exp_avg, u8* exp_avg_exponents, u8* exp_avg_sq, u8* exp_avg_sq_exponents, const void* grad,
    void* out, const float* control, float factor, u32 key, float decay, float l2, float weight1, float beta2,
    float weight2, float inverse_root, float eps, float negative_step, i64 numel, FIXED grad_kind, FIXED moment_kind,
    FIXED out_kind) {
    if (!applies(control, &factor)) return;
    const Adam rule = {decay, l2, weight1, beta2, weight2, inverse_root, eps, negative_step};
    bool aligned = takes(4, master, FLOAT32) && takes(4, grad, grad_kind) && takes(4, out, out_kind) &&
                   takes(4, exp_avg, BYTE) && takes(4, exp_avg_sq, BYTE);
    for_items(numel, aligned, [&](auto width, i64 first) {
        constexpr int WIDTH = width;
        Words xs = load<WIDTH>(master, first, numel, FLOAT32), gs = load<WIDTH>(grad, first, numel, grad_kind);
        Words m_codes = load<WIDTH>(exp_avg, first, numel, BYTE), v_codes = load<WIDTH>(exp_avg_sq, first, numel, BYTE);
        u32 m_exponent = load<1>(exp_avg_exponents, first / BLOCK, (numel + BLOCK - 1) / BLOCK, BYTE).at[0];
        u32 v_exponent = load<1>(exp_avg_sq_exponents, first / BLOCK, (numel + BLOCK - 1) / BLOCK, BYTE).at[0];
        float grads[WIDTH], outs[WIDTH], ms[WIDTH], vs[WIDTH];
        numbers_of(gs, grad_kind, grads);
        u32 masters[WIDTH], randoms[WIDTH], m_raws[WIDTH], v_raws[WIDTH];
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            float x = float_of_bits(xs.at[k]), before = x, moments[2];
            moments[0] = decode_signed(raw_of(m_codes, k, BYTE), m_exponent);
            moments[1] = decode_unsigned(raw_of(v_codes, k, BYTE), v_exponent);
            outs[k] = rule(x, moments, mul_rn(grads[k], factor));
            masters[k] = bits_of_float(x);
            randoms[k] = random_bits(before, moments[0], key);
            // All lanes of a warp take part in the maximum; lanes beyond the end contribute zeros.
            ms[k] = first < numel ? moments[0] : 0.0f;
            vs[k] = first < numel ? moments[1] : 0.0f;
            __syncwarp();
        }
        m_exponent = block_exponent(ms);
        v_exponent = block_exponent(vs);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            m_raws[k] = encode_signed(ms[k], m_exponent, randoms[k]);
            v_raws[k] = encode_unsigned(vs[k], v_exponent, randoms[k] >> 16);
        }
        store_raws(exp_avg, first, numel, m_raws, BYTE);
        store_raws(exp_avg_sq, first, numel, v_raws, BYTE);
        if (first < numel && first % BLOCK == 0) {
            exp_avg_exponents[first / BLOCK] = (u8)m_exponent;
            exp_avg_sq_exponents[first / BLOCK] = (u8)v_exponent;
        }
        store_raws(master, first, numel, masters, FLOAT32);
        if (out) store(out, first, numel, outs, out_kind);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) lion(
    float* master, void* exp_avg, const void* grad, void* out, const float* control, float factor, u32 key, float decay,
    float beta1, float weight1, float beta2, float weight2, float negative_lr, i64 numel, FIXED grad_kind,
    FIXED moment_kind, FIXED out_kind) {
    auto rule = [=](float& x, float* m, float d) {
        float c = add_rn(mul_rn(beta1, *m), mul_rn(weight1, d));
        *m = add_rn(mul_rn(beta2, *m), mul_rn(weight2, d));
        float direction = is_less(0.0f, c) ? 1.0f : is_less(c, 0.0f) ? -1.0f : c;
        return x = add_rn(mul_rn(x, decay), mul_rn(negative_lr, direction));
    };
    update(
        master, {exp_avg}, grad, out, control, factor, key, numel, grad_kind, moment_kind, out_kind, rule);
}

extern "C" __global__ void __launch_bounds__(THREADS) adagrad(
    float* master, void* square_sum, const void* grad, void* out, const float* control, float factor, u32 key, float l2,
    float eps, float negative_lr, i64 numel, FIXED grad_kind, FIXED moment_kind, FIXED out_kind) {
    auto rule = [=](float& x, float* sum, float scaled) {
        float d = add_rn(scaled, mul_rn(l2, x));
        *sum = add_rn(*sum, mul_rn(d, d));
        return x = add_rn(x, div_rn(mul_rn(negative_lr, d), add_rn(sqrt_rn(*sum), eps)));
    };
    update(
        master, {square_sum}, grad, out, control, factor, key, numel, grad_kind, moment_kind, out_kind, rule);
}

// `momentum_buffer` is null without momentum, `grad_avg` unless centered.
extern "C" __global__ void __launch_bounds__(THREADS) rmsprop(
    float* master, float* square_avg, float* momentum_buffer, float* grad_avg, const void* grad, void* out,
    const float* control, float factor, float l2, float alpha, float weight, float eps, float momentum,
    float negative_lr, i64 numel, FIXED grad_kind, FIXED moment_kind, FIXED out_kind) {
    auto rule = [=](float& x, float* states, float scaled) {
        float d = add_rn(scaled, mul_rn(l2, x)), &s = states[0], &b = states[1], &a = states[2];
        s = add_rn(mul_rn(s, alpha), mul_rn(mul_rn(weight, d), d));
        a = add_rn(a, mul_rn(weight, sub_rn(d, a)));
        float c = grad_avg ? sub_rn(s, mul_rn(a, a)) : s;
        if (grad_avg && is_less(c, 0.0f)) c = 0.0f;
        d = div_rn(d, add_rn(sqrt_rn(c), eps));
        if (momentum_buffer) d = add_rn(mul_rn(momentum, b), d);
        b = d;
        return x = add_rn(x, mul_rn(negative_lr, d));
    };
    update(
        master, {square_avg, momentum_buffer, grad_avg}, grad, out, control, factor, 0, numel, grad_kind, FLOAT32,
        out_kind, rule);
}

// `momentum_buffer` is null without momentum.
extern "C" __global__ void __launch_bounds__(THREADS) sgd(
    float* master, float* momentum_buffer, const void* grad, void* out, const float* control, float factor, float l2,
    float momentum, float weight, float grad_weight, float buffer_weight, float negative_lr, i64 numel, FIXED grad_kind,
    FIXED moment_kind, FIXED out_kind) {
    auto rule = [=](float& x, float* buffer, float scaled) {
        float d = add_rn(scaled, mul_rn(l2, x));
        *buffer = add_rn(mul_rn(momentum, *buffer), mul_rn(weight, d));
        if (momentum_buffer) d = add_rn(mul_rn(grad_weight, d), mul_rn(buffer_weight, *buffer));
        return x = add_rn(x, mul_rn(negative_lr, d));
    };
    update(
        master, {momentum_buffer}, grad, out, control, factor, 0, numel, grad_kind, FLOAT32, out_kind, rule);
}

// ---- optimizers of whole tensors: row y of the grid processes tensor y of each argument ----

#define MANY 64 /* maximum number of tensors of a launch; their addresses are arguments */

struct Tensors {
    void* at[MANY];
};

struct Numels {
    i64 of[MANY];
};

extern "C" __global__ void __launch_bounds__(THREADS) adam_many(
    Tensors masters, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors grads, Tensors outs, Numels numels, float factor,
    float decay, float l2, float weight1, float beta2, float weight2, float inverse_root, float eps,
    float negative_step, FIXED grad_kind, FIXED out_kind) {
    const Adam rule = {decay, l2, weight1, beta2, weight2, inverse_root, eps, negative_step};
    int row = blockIdx.y;
    update(
        (float*)masters.at[row], {exp_avgs.at[row], exp_avg_sqs.at[row]}, grads.at[row], outs.at[row], nullptr, factor,
        0, numels.of[row], grad_kind, FLOAT32, out_kind, rule);
}

// Returns the sum of a block's values in thread 0. All threads take part; the order of the sum is fixed.
__device__ __forceinline__ double block_sum(double value) {
    __shared__ double sums[WARPS];
    for (int distance = 16; distance; distance >>= 1) {
        value = __dadd_rn(value, __shfl_xor_sync(FULL_WARP, value, distance));
    }
    __syncthreads();  // for an earlier sum
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    double total = sums[0];
    for (int warp = 1; warp < WARPS; ++warp) total = __dadd_rn(total, sums[warp]);
    return total;
}

// Computes moments and `update`, and for each thread block the sums of squares of master and update:
// (2, tensors, blocks).
extern "C" __global__ void __launch_bounds__(THREADS) lamb_moments(
    Tensors masters, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors grads, Tensors updates, Numels numels,
    double* square_sums, float factor, float beta1, float weight1, float beta2, float weight2, float eps, float decay,
    FIXED eps_inside, FIXED grad_kind) {
    const float* master = (const float*)masters.at[blockIdx.y];
    float *m = (float*)exp_avgs.at[blockIdx.y], *v = (float*)exp_avg_sqs.at[blockIdx.y];
    float* update = (float*)updates.at[blockIdx.y];
    i64 first = (i64)blockIdx.x * (THREADS * ITEMS) + threadIdx.x, numel = numels.of[blockIdx.y];
    double weights = 0.0, steps = 0.0;
    for (int k = 0; k < ITEMS; ++k) {
        i64 i = first + k * THREADS;  // the sums depend on which elements a thread has
        if (i < numel) {
            float d = mul_rn(number_of(load_raw(grads.at[blockIdx.y], i, grad_kind), grad_kind), factor);
            float x = master[i], a = add_rn(mul_rn(m[i], beta1), mul_rn(d, weight1));
            float b = add_rn(mul_rn(v[i], beta2), mul_rn(mul_rn(d, d), weight2));
            float below = eps_inside ? sqrt_rn(add_rn(b, eps)) : add_rn(sqrt_rn(b), eps);
            float u = add_rn(div_rn(a, below), mul_rn(x, decay));
            m[i] = a;
            v[i] = b;
            update[i] = u;
            weights = __dadd_rn(weights, __dmul_rn(widen(x), widen(x)));
            steps = __dadd_rn(steps, __dmul_rn(widen(u), widen(u)));
        }
    }
    weights = block_sum(weights);
    steps = block_sum(steps);
    if (threadIdx.x == 0) {
        i64 place = (i64)blockIdx.y * gridDim.x + blockIdx.x;
        square_sums[place] = weights;
        square_sums[(i64)gridDim.y * gridDim.x + place] = steps;
    }
}

// `norms` are the norms of the masters and of the updates: (2, tensors).
extern "C" __global__ void __launch_bounds__(THREADS) lamb_apply(
    Tensors masters, Tensors updates, Tensors outs, Numels numels, const float* norms, float step_size,
    float least_ratio, float most_ratio, FIXED out_kind) {
    float weights = norms[blockIdx.y], steps = norms[gridDim.y + blockIdx.y];
    float ratio = div_rn(weights, steps);
    ratio = is_less(ratio, least_ratio) ? least_ratio : is_less(most_ratio, ratio) ? most_ratio : ratio;
    if (is_zero(weights) || is_zero(steps)) ratio = 1.0f;
    float rate = mul_rn(ratio, step_size);
    auto rule = [=](float& x, float*, float step) { return x = sub_rn(x, mul_rn(step, rate)); };
    int row = blockIdx.y;
    update(
        (float*)masters.at[row], {nullptr}, updates.at[row], outs.at[row], nullptr, 1.0f, 0, numels.of[row],
        FLOAT32, FLOAT32, out_kind, rule);
}

extern "C" __global__ void __launch_bounds__(THREADS) muon_momentum(
    Tensors buffers, Tensors grads, Tensors updates, Numels numels, float factor, float momentum, float weight,
    FIXED nesterov, FIXED grad_kind, FIXED update_kind) {
    auto rule = [=](float& buffer, float*, float d) {
        float own = mul_rn(d, weight);
        buffer = add_rn(mul_rn(buffer, momentum), own);
        return nesterov ? add_rn(mul_rn(buffer, momentum), own) : buffer;
    };
    int row = blockIdx.y;
    update(
        (float*)buffers.at[row], {nullptr}, grads.at[row], updates.at[row], nullptr, factor, 0, numels.of[row],
        grad_kind, FLOAT32, update_kind, rule);
}

extern "C" __global__ void __launch_bounds__(THREADS) muon_apply(
    Tensors masters, Tensors directions, Tensors outs, Numels numels, float decay, float rate, FIXED direction_kind,
    FIXED out_kind) {
    auto rule = [=](float& x, float*, float step) { return x = sub_rn(mul_rn(x, decay), mul_rn(step, rate)); };
    int row = blockIdx.y;
    update(
        (float*)masters.at[row], {nullptr}, directions.at[row], outs.at[row], nullptr, 1.0f, 0, numels.of[row],
        direction_kind, FLOAT32, out_kind, rule);
}

// ---- the gradient norm: `reductions.py` ----

// Calls `use(raws, count)` for all elements of an array, up to 8 at a time, in any order; loads 16 bytes at once if the
// array begins at a multiple of 16 bytes.
template <class Kind, class Use>
__device__ __forceinline__ void for_each(const void* values, i64 numel, Kind kind, Use use) {
    i64 per_load = kind == FLOAT32 ? 4 : 8, thread = (i64)blockIdx.x * THREADS + threadIdx.x;
    i64 threads = (i64)gridDim.x * THREADS, loads = (u64)values % sizeof(Words) ? 0 : numel / per_load;
#pragma unroll 2
    for (i64 i = thread; i < loads; i += threads) {
        Words words = ((const Words*)values)[i];
        if (kind == FLOAT32) {
            use(words.at, 4);
        } else {
            u32 raws[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) raws[k] = k % 2 ? words.at[k / 2] >> 16 : words.at[k / 2] & 0xffffu;
            use(raws, 8);
        }
    }
    for (i64 i = loads * per_load + thread; i < numel; i += threads) {
        u32 raw = load_raw(values, i, kind);
        use(&raw, 1);
    }
}

// Sets the bits of the elements that differ, see `changed.py`; a thread compares the 8 elements of a byte.
extern "C" __global__ void __launch_bounds__(THREADS) mark_changed(
    const u16* before, const u16* after, u8* bits, i64 numel) {
    i64 byte = (i64)blockIdx.x * THREADS + threadIdx.x, first = 8 * byte;
    if (first >= numel) return;
    u32 marks = 0;
    if (first + 8 <= numel && ((u64)before | (u64)after) % sizeof(Words) == 0) {
        Words one = ((const Words*)before)[byte], other = ((const Words*)after)[byte];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 differs = one.at[k] ^ other.at[k];
            marks |= (differs & 0xffffu ? 1u : 0u) << 2 * k | (differs >> 16 ? 2u : 0u) << 2 * k;
        }
    } else {
        for (int k = 0; k < 8 && first + k < numel; ++k) marks |= (before[first + k] != after[first + k] ? 1u : 0u) << k;
    }
    bits[byte] |= (u8)marks;
}

// Raises `largest` to the bits of the largest magnitude; NaN is above inf.
extern "C" __global__ void __launch_bounds__(THREADS) max_abs(
    const void* values, int* largest, i64 numel, FIXED kind) {
    __shared__ u32 of_warp[WARPS];
    u32 found = 0, mask = kind == FLOAT32 ? 0x7fffffffu : 0x7fffu;
    for_each(values, numel, kind, [&](const u32* raws, int count) {
        for (int k = 0; k < count; ++k) found = larger(found, raws[k] & mask);
    });
    found = warp_max(found);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = found;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; ++w) found = larger(found, of_warp[w]);
        atomicMax(largest, (int)bits_of_raw(found, kind));
    }
}

__device__ __forceinline__ double double_of(u64 bits) { return __longlong_as_double((i64)bits); }

// Adds the upper and the lower bits of the squares to `sums`, as integers; nothing if `largest` is not finite.
//
// It builds a float32 times the power of two of the norm's scale from bits, in float64: a conversion would be slower
// than the memory. The square has at most 48 bits and is below 2**50, so that the addition of 2**52 rounds it to an
// integer, which the lower 52 bits hold. Up to eight of them are added before they are split.
extern "C" __global__ void __launch_bounds__(THREADS) square_sums(
    const void* values, const int* largest, u64* sums, i64 numel, FIXED kind) {
    __shared__ u64 of_warp[2][WARPS];
    u32 top = (u32)*largest;
    if (top >= INFINITY_BITS) return;
    // 2**exponent is the smallest power of two above the largest; `offset` converts a float32's exponent to a double's.
    int exponent = top >= 0x800000u ? (int)(top >> 23) - 126 : top ? 32 - __clz((int)top) - 149 : 0;
    u64 offset = (u64)(i64)(1023 - 127 + SUM_BITS - exponent) << 52;
    double implicit = double_of((0x800000ull << 29) + offset);
    u64 high = 0, low = 0;
    auto run = [&](auto kind, auto counts_subnormal) {
        for_each(values, numel, kind, [&](const u32* raws, int count) {
            u64 sum = 0;
            for (int k = 0; k < count; ++k) {
                u32 bits = bits_of_raw(raws[k], kind) & 0x7fffffffu;
                double root = double_of(((u64)bits << 29) + offset);
                if (counts_subnormal && bits < 0x800000u) {
                    root = __dsub_rn(double_of(((u64)(bits | 0x800000u) << 29) + offset), implicit);
                }
                sum += (u64)__double_as_longlong(__fma_rn(root, root, 4503599627370496.0)) - (0x433ull << 52);
            }
            high += sum >> SUM_BITS;
            low += sum & ((1u << SUM_BITS) - 1);
        });
    };
    // Unless the largest is tiny, the square of a subnormal number rounds to 0, in either form.
    auto run_kind = [&](auto kind) {
        if (exponent < -100) {
            run(kind, Constant<1>());
        } else {
            run(kind, Constant<0>());
        }
    };
    if (kind == FLOAT32) {
        run_kind(Constant<FLOAT32>());
    } else if (kind == BFLOAT16) {
        run_kind(Constant<BFLOAT16>());
    } else {
        run(Constant<FLOAT16>(), Constant<0>());
    }
    for (int distance = 16; distance; distance >>= 1) {
        high += __shfl_xor_sync(FULL_WARP, high, distance);
        low += __shfl_xor_sync(FULL_WARP, low, distance);
    }
    if (threadIdx.x % 32 == 0) {
        of_warp[0][threadIdx.x / 32] = high;
        of_warp[1][threadIdx.x / 32] = low;
    }
    __syncthreads();
    if (threadIdx.x < 2) {
        u64 total = 0;
        for (int w = 0; w < WARPS; ++w) total += of_warp[threadIdx.x][w];
        if (total) atomicAdd(&sums[threadIdx.x], total);
    }
}

// ---- the decisions of a step: `step_control.py`; one thread ----

extern "C" __global__ void write_facts(
    const int* largest, i64 history, i64 settings, int stop, i64 order, double* facts) {
    u32 top = (u32)*largest;
    facts[0] = top >= INFINITY_BITS ? double_of(0x7ff0000000000000ull) : widen(float_of_bits(top));
    facts[1] = (double)history;
    facts[2] = -(double)history;
    facts[3] = (double)settings;
    facts[4] = -(double)settings;
    facts[5] = (double)stop;
    facts[6] = (double)order;
    facts[7] = -(double)order;
}

extern "C" __global__ void largest_of_facts(const double* facts, int* largest) {
    *largest = (int)bits_of_float(narrow_rn(facts[0]));
}

// `sums` is null without a norm.
extern "C" __global__ void finalize(
    const double* facts, const u64* sums, float* control, double* summary, double scale, double clipping,
    double grad_factor, int skip_overflow) {
    const double infinity = double_of(0x7ff0000000000000ull), nan = double_of(0x7ff8000000000000ull);
    double largest = facts[0], norm = nan;
    bool finite = largest < infinity, same_history = facts[1] == -facts[2], same_settings = facts[3] == -facts[4];
    if (sums && finite && same_history && same_settings) {
        u64 high = sums[0] + (sums[1] >> SUM_BITS), low = sums[1] & ((1u << SUM_BITS) - 1);
        double upper = __dmul_rn((double)(high >> 11), 68719476736.0);  // 2**36
        double root = __dsqrt_rn(__dadd_rn(upper, (double)(((high & 2047u) << SUM_BITS) | low)));
        // The largest is a float32 value, and so a normal number in float64.
        u64 bits = (u64)__double_as_longlong(largest);
        i64 exponent = bits ? (i64)(bits >> 52) - 1022 : 0;
        norm = __dmul_rn(root, double_of((u64)(exponent - SUM_BITS + 1023) << 52));
    }
    double clip = 1.0, unscaled = finite ? __ddiv_rn(norm, scale) : infinity;
    if (clipping > 0.0) {
        double ratio = __ddiv_rn(clipping, __dadd_rn(unscaled, 1e-6));
        clip = ratio < 1.0 ? ratio : 1.0;  // 1 for NaN too: without a norm there is no clipping
    }
    if (grad_factor < clip) clip = grad_factor;
    control[0] = narrow_rn(__ddiv_rn(clip, scale));
    control[1] = same_history && same_settings && (finite || !skip_overflow) ? 1.0f : 0.0f;
    summary[0] = finite ? 1.0 : 0.0;
    summary[1] = norm;
    summary[2] = same_history ? 1.0 : 0.0;
    summary[3] = same_settings ? 1.0 : 0.0;
    summary[4] = facts[5];
    summary[5] = facts[6] == -facts[7] ? 1.0 : 0.0;
}

// ---- codes: the format of `comm/quantized.py`; a warp processes a block, blockIdx.y is the row ----

// Returns, in the low bits, a float32 below 2**22 rounded to an integer, ties to even, in two's complement.
__device__ __forceinline__ u32 to_integer(float value) { return bits_of_float(add_rn(value, 12582912.0f)); }

__device__ __forceinline__ int warp_index() { return blockIdx.x * WARPS + threadIdx.x / 32; }

// Codes are integers up to `levels`, 127 or 7, or numbers in e4m3 up to 448.
enum { LEVELS_OF_4_BITS = 7, LEVELS_OF_E4M3 = 448 };

__device__ __forceinline__ int bits_of_levels(int levels) { return levels == LEVELS_OF_4_BITS ? 4 : 8; }

// Encodes a float32 that rounds to at most 448; rounds to nearest, ties to even.
__device__ __forceinline__ u8 encode_e4m3(float value) {
    u32 bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    u32 normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - ((127u - 7u) << 23)) >> 20;
    // In [2**14, 2**15) a float32's last place is 2**-9, as in a subnormal e4m3, so the addition rounds.
    u32 subnormal = bits_of_float(add_rn(float_of_bits(magnitude), 16384.0f)) - ((127u + 14u) << 23);
    return (u8)((magnitude < (127u - 6u) << 23 ? subnormal : normal) | ((bits >> 24) & 0x80u));
}

__device__ __forceinline__ float decode_e4m3(u32 code) {
    u32 magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    u32 subnormal = bits_of_float(sub_rn(float_of_bits((127u + 14u) << 23 | magnitude), 16384.0f));
    u32 normal = magnitude == 0x7fu ? NAN_BITS : (magnitude << 20) + ((127u - 7u) << 23);
    return float_of_bits(sign | (magnitude < 8u ? subnormal : normal));
}

// Decodes a code, which is a byte or half a byte, to its number.
__device__ __forceinline__ float number_of_byte(u32 byte, int levels, bool upper) {
    if (levels == LEVELS_OF_E4M3) return decode_e4m3(byte);
    // In [2**23, 2**24) a float32's last place is 1. Conversions take longer than these operations.
    if (levels != LEVELS_OF_4_BITS) return sub_rn(float_of_bits(byte ^ 0x4b000080u), 8388736.0f);
    return sub_rn(float_of_bits((upper ? byte >> 4 : byte & 15u) ^ 0x4b000008u), 8388616.0f);
}

// Decodes value i of n: its code is a byte, or 4 bits, with value i + ceil(n / 2) in the upper half of byte i.
__device__ __forceinline__ float number_at(const u8* numbers, int i, int n, int levels) {
    int half = levels == LEVELS_OF_4_BITS ? (n + 1) / 2 : n;
    return number_of_byte(numbers[i < half ? i : i - half], levels, i >= half);
}

// Encodes the numbers of a block as bytes, or half bytes, at `numbers`, and its scale. A lane has WIDTH values of each
// half of the block in a round, since a byte of 4-bit codes has one of each. It keeps the values of ROUNDS rounds, which
// are all values of a block of at most 512, unless WIDTH is 1.
template <int WIDTH>
__device__ __forceinline__ void encode_block(
    const void* values, int size, u8* numbers, float* scale_of, int kind, int levels) {
    constexpr int ROUNDS = WIDTH == 8 ? 1 : 2;
    const int lane = threadIdx.x % 32, half = (size + 1) / 2, round = WIDTH * 32, kept = ROUNDS * round;
    Words words[ROUNDS][2];
    auto load_round = [&](int begin) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            int at = begin + r * round + WIDTH * lane;
            words[r][0] = words[r][1] = {};
            if (at < half) words[r][0] = load<WIDTH>(values, at, half, kind);
            if (at < half) words[r][1] = load<WIDTH>(values, half + at, size, kind);
        }
    };
    u32 largest = 0, mask = kind == FLOAT32 ? 0x7fffffffu : 0x7fffu;
    for (int begin = 0; begin < half; begin += kept) {
        load_round(begin);
#pragma unroll
        for (int k = 0; k < 2 * ROUNDS * WIDTH; ++k) {
            largest = larger(largest, raw_of(words[k / (2 * WIDTH)][k / WIDTH % 2], k % WIDTH, kind) & mask);
        }
    }
    largest = bits_of_raw(warp_max(largest), kind);
    float scale = div_rn(float_of_bits(largest), (float)levels);
    scale = is_less(scale, float_of_bits(SCALE_FLOOR_BITS)) ? float_of_bits(SCALE_FLOOR_BITS) : scale;
    scale = float_of_bits(bits_of_float(scale) & 0xffffff80u);  // 17 bits, as in `kernels._block_scale`
    bool finite = largest < INFINITY_BITS;
    if (!finite) scale = float_of_bits(NAN_BITS);
    if (lane == 0) *scale_of = scale;
    float inverse = div_rn(1.0f, scale);
    for (int begin = 0; begin < half; begin += kept) {
        if (half > kept) load_round(begin);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            int at = begin + r * round + WIDTH * lane;
            if (at >= half) continue;
            u32 codes[2][WIDTH];
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                float scaled[WIDTH];
                numbers_of(words[r][part], kind, scaled);
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) {
                    scaled[k] = mul_rn(scaled[k], inverse);
                    u32 code = levels == LEVELS_OF_E4M3 ? encode_e4m3(scaled[k]) : to_integer(scaled[k]) & 0xffu;
                    codes[part][k] = finite ? code : 0;
                }
            }
            if (levels == LEVELS_OF_4_BITS) {
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) codes[0][k] = (codes[0][k] & 15u) | (codes[1][k] << 4 & 0xf0u);
            } else {
                store_raws(numbers, half + at, size, codes[1], BYTE);
            }
            store_raws(numbers, at, half, codes[0], BYTE);
        }
    }
}

// Returns true if lanes can take `width` values of each half of a block: at `values`, and at `numbers`.
__device__ __forceinline__ bool halves_take(int width, const void* values, const u8* numbers, int size, int kind) {
    return size % (2 * width) == 0 && takes(width, values, kind) && takes(width, numbers, BYTE);
}

// Writes the code of row order[r] of `values`, or of row r if `order` is null, to row r of `codes`; rows
// [skip_first, skip_last) do not change.
extern "C" __global__ void __launch_bounds__(THREADS) encode(
    const void* values, const int* order, u8* codes, i64 numel, i64 code_nbytes, FIXED kind, FIXED levels, FIXED block,
    int skip_first, int skip_last) {
    int row = blockIdx.y, index = warp_index(), lane = threadIdx.x % 32, bits = bits_of_levels(levels);
    i64 blocks = (numel + block - 1) / block;
    if (index >= blocks || (row >= skip_first && row < skip_last)) return;
    i64 start = (i64)index * block;
    int size = (int)(numel - start < block ? numel - start : block);
    i64 first = (order ? order[row] : row) * numel + start;
    u8* code = codes + row * code_nbytes;
    u8* numbers = code + 4 * blocks + start * bits / 8;
    const void* begin = (const char*)values + first * size_of(kind);
    float* scale = (float*)code + index;
    bool wide = kind != FLOAT32 && block % 512 == 0;
    if (wide && size == block && halves_take(8, begin, numbers, block, kind)) {
        encode_block<8>(begin, block, numbers, scale, kind, levels);
    } else if (!wide && size == block && halves_take(4, begin, numbers, block, kind)) {
        encode_block<4>(begin, block, numbers, scale, kind, levels);
    } else {
        encode_block<1>(begin, size, numbers, scale, kind, levels);
    }
    // Zeroes the padding, so that equal values have bytewise equal codes.
    if (index == blocks - 1) {
        for (i64 i = 4 * blocks + (numel * bits + 7) / 8 + lane; i < code_nbytes; i += 32) code[i] = 0;
    }
}

// Stores or adds the numbers of WIDTH codes, which are whole bytes or halves of bytes.
template <int WIDTH>
__device__ __forceinline__ void decode_bytes(
    const Words& bytes, float scale, void* out, int first, int end, int kind, int levels, bool upper, int adds) {
    Words before;
    if (adds) before = load<WIDTH>(out, first, end, FLOAT32);
    float values[WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        values[k] = mul_rn(number_of_byte(raw_of(bytes, k, BYTE), levels, upper), scale);
        if (adds) values[k] = add_rn(float_of_bits(before.at[k]), values[k]);
    }
    store(out, first, end, values, kind);
}

// Decodes a block; a lane loads the codes of four rounds before it decodes them.
template <int WIDTH>
__device__ __forceinline__ void decode_block(
    const u8* numbers, float scale, void* out, int size, int kind, int levels, int adds) {
    const int round = WIDTH * 32, bits = bits_of_levels(levels), nbytes = bits == 4 ? (size + 1) / 2 : size;
    for (int begin = WIDTH * (threadIdx.x % 32); begin < nbytes; begin += 4 * round) {
        Words words[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if (begin + r * round < nbytes) words[r] = load<WIDTH>(numbers, begin + r * round, nbytes, BYTE);
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            int at = begin + r * round;
            if (at >= nbytes) continue;
            decode_bytes<WIDTH>(words[r], scale, out, at, nbytes, kind, levels, false, adds);
            if (bits == 4) decode_bytes<WIDTH>(words[r], scale, out, nbytes + at, size, kind, levels, true, adds);
        }
    }
}

// Writes the values of row r of `codes` to row r of `out`, or with `adds` adds them, in float32.
extern "C" __global__ void __launch_bounds__(THREADS) decode(
    const u8* codes, void* out, i64 numel, i64 code_nbytes, FIXED kind, FIXED levels, FIXED block, FIXED adds) {
    int row = blockIdx.y, index = warp_index(), bits = bits_of_levels(levels);
    i64 blocks = (numel + block - 1) / block;
    if (index >= blocks) return;
    i64 start = (i64)index * block;
    int size = (int)(numel - start < block ? numel - start : block);
    const u8* code = codes + row * code_nbytes;
    const u8* numbers = code + 4 * blocks + start * bits / 8;
    float scale = ((const float*)code)[index];
    void* begin = (char*)out + (row * numel + start) * size_of(kind);
    bool wide = kind != FLOAT32 && block * bits % 2048 == 0;
    if (wide && size == block && halves_take(8, begin, numbers, block, kind)) {
        decode_block<8>(numbers, scale, begin, block, kind, levels, adds);
    } else if (!wide && size == block && halves_take(4, begin, numbers, block, kind)) {
        decode_block<4>(numbers, scale, begin, block, kind, levels, adds);
    } else {
        decode_block<1>(numbers, scale, begin, size, kind, levels, adds);
    }
}

// Computes totals[r] = ((0 + c0) + c1) + ... in float32, with the values c of codes[rank][r]; for rank `own` they are
// row order[own * rows + r] of `values`, or row own * rows + r if `order` is null.
extern "C" __global__ void __launch_bounds__(THREADS) sum_codes(
    const u8* codes, const void* values, const int* order, float* totals, i64 numel, i64 code_nbytes, FIXED kind,
    FIXED levels, FIXED block, int ranks, int own) {
    int row = blockIdx.y, rows = gridDim.y, index = warp_index(), lane = threadIdx.x % 32, bits = bits_of_levels(levels);
    i64 blocks = (numel + block - 1) / block;
    if (index >= blocks) return;
    i64 start = (i64)index * block;
    int size = (int)(numel - start < block ? numel - start : block);
    int own_row = own * rows + row;
    i64 own_first = (order ? order[own_row] : own_row) * numel + start;
    for (int i = lane; i < size; i += 32) {
        float total = 0.0f;
        for (int rank = 0; rank < ranks; ++rank) {
            float value;
            if (rank == own) {
                value = number_of(load_raw(values, own_first + i, kind), kind);
            } else {
                const u8* code = codes + ((i64)rank * rows + row) * code_nbytes;
                const u8* numbers = code + 4 * blocks + start * bits / 8;
                value = mul_rn(number_at(numbers, i, size, levels), ((const float*)code)[index]);
            }
            total = add_rn(total, value);
        }
        totals[row * numel + start + i] = total;
    }
}

// Decodes 4-bit indices of `levels` (16,): the format of `comm/level_codes.py`, in blocks whose size is a power of two,
// at least 8 values. Scales are float32, or exponents of powers of two. A thread decodes eight bytes; row blockIdx.y of
// `out` has the values of that row of `code`.
extern "C" __global__ void __launch_bounds__(THREADS) decode_levels(
    const u8* code, void* out, const float* levels, i64 numel, i64 code_nbytes, int codes_at, FIXED kind, FIXED block,
    FIXED has_exponents) {
    const u8 *scales = code + blockIdx.y * code_nbytes, *codes = scales + codes_at;
    __shared__ float table[16];
    if (threadIdx.x < 16) table[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const int half = block / 2;
    i64 begin = 8 * ((i64)blockIdx.x * THREADS + threadIdx.x);
    // Decodes bytes of one block.
    auto decode_some = [&](auto width, i64 byte) {
        constexpr int WIDTH = width;
        if (2 * byte >= numel) return;
        i64 index = byte >> (31 - __clz(half)), first = byte + index * half;
        u32 size = has_exponents ? scales[index] : ((const u32*)scales)[index];
        if (has_exponents) size = size == 255u ? NAN_BITS : size << 23;
        Words words = {};
        if (takes(WIDTH, codes, BYTE)) {
            words = load<WIDTH>(codes, byte, numel, BYTE);
        } else {
            for (int k = 0; k < WIDTH; ++k) words.at[k / 4] |= (u32)codes[byte + k] << 8 * (k % 4);
        }
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            float values[WIDTH];
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                values[k] = mul_rn(table[raw_of(words, k, BYTE) >> 4 * upper & 15u], float_of_bits(size));
            }
            i64 at = blockIdx.y * numel + first + upper * half;
            if (takes(WIDTH, (char*)out + at * size_of(kind), kind)) {
                store(out, at, numel, values, kind);
            } else {
                for (int k = 0; k < WIDTH; ++k) store<1>(out, at + k, at + WIDTH, {values[k]}, kind);
            }
        }
    };
    if (half >= 8 && kind != FLOAT32) {
        decode_some(Constant<8>(), begin);
    } else {
        for (int part = 0; part < 2; ++part) decode_some(Constant<4>(), begin + 4 * part);
    }
}
