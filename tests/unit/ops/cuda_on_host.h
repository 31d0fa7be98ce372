// The subset of CUDA that zeroaccel's kernels use, for the host's C++ compiler.
//
// Every thread of a thread block is a fiber. It runs until it ends or waits for its warp or its block, and continues
// when all threads of that warp or block wait. A read of shared memory before a barrier, or a lane left out of a
// shuffle, therefore shows as wrong bits, or ends the process with a message.
//
// Thread blocks run one after another. Floats are the host's; compile without contraction.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct Index {
    unsigned x, y;
};

static Index blockIdx, threadIdx, blockDim, gridDim;

// ---- fibers ----

enum State { READY, AT_WARP, AT_BLOCK, ENDED };

struct Fiber {
    ucontext_t context;
    State state;
    std::vector<char> stack;
    unsigned long long sent;
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static void (*body)();

[[noreturn]] static void stop(const char* message) {
    fprintf(stderr, "a kernel on the host: %s\n", message);
    abort();
}

static void wait_as(State state) {
    Fiber& own = fibers[threadIdx.x];
    own.state = state;
    swapcontext(&own.context, &scheduler);
}

static void enter() {
    body();
    fibers[threadIdx.x].state = ENDED;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

// Makes the threads of [first, last) ready if all that have not ended wait in `state`; returns true if there are any.
static bool release(unsigned first, unsigned last, State state) {
    for (unsigned t = first; t < last; ++t) {
        if (fibers[t].state != state && fibers[t].state != ENDED) return false;
    }
    bool any = false;
    for (unsigned t = first; t < last; ++t) {
        if (fibers[t].state == state) fibers[t].state = READY, any = true;
    }
    return any;
}

static void run_block(unsigned threads) {
    if (threads % 32) stop("a thread block is not made of full warps");
    fibers.resize(threads);
    for (Fiber& fiber : fibers) {
        fiber.stack.resize(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
        fiber.state = READY;
    }
    for (;;) {
        bool ran = false, ended = true;
        for (unsigned t = 0; t < threads; ++t) {
            if (fibers[t].state == READY) {
                threadIdx = {t, 0};
                swapcontext(&scheduler, &fibers[t].context);
                ran = true;
            }
            ended = ended && fibers[t].state == ENDED;
        }
        if (ended) return;
        bool released = release(0, threads, AT_BLOCK);
        for (unsigned warp = 0; warp < threads; warp += 32) released = release(warp, warp + 32, AT_WARP) || released;
        if (!ran && !released) stop("threads wait for others that never arrive");
    }
}

static inline void __syncthreads() { wait_as(AT_BLOCK); }
static inline void __syncwarp() { wait_as(AT_WARP); }

// ---- warp operations on all 32 lanes ----

static void check_mask(unsigned mask) {
    if (mask != 0xffffffffu) stop("a warp operation on a part of the lanes");
}

static void check_lanes() {
    unsigned warp = threadIdx.x / 32 * 32;
    for (unsigned t = warp; t < warp + 32; ++t) {
        if (fibers[t].state == ENDED) stop("a lane of a warp operation has ended");
    }
}

template <class T> static T __shfl_xor_sync(unsigned mask, T value, int distance) {
    check_mask(mask);
    unsigned self = threadIdx.x;
    memcpy(&fibers[self].sent, &value, sizeof(T));
    wait_as(AT_WARP);
    check_lanes();
    T received;
    memcpy(&received, &fibers[self ^ distance].sent, sizeof(T));
    wait_as(AT_WARP);  // until all lanes have read
    return received;
}

static unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    check_mask(mask);
    unsigned warp = threadIdx.x / 32 * 32, largest = 0;
    fibers[threadIdx.x].sent = value;
    wait_as(AT_WARP);
    check_lanes();
    for (unsigned t = warp; t < warp + 32; ++t) {
        unsigned sent = (unsigned)fibers[t].sent;
        largest = sent > largest ? sent : largest;
    }
    wait_as(AT_WARP);
    return largest;
}

// ---- arithmetic ----

template <class To, class From> static inline To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "patterns of one size");
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}

static inline unsigned bits_of_float(float value) { return same_bits<unsigned>(value); }
static inline float float_of_bits(unsigned bits) { return same_bits<float>(bits); }
static inline double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
static inline long long __double_as_longlong(double value) { return same_bits<long long>(value); }
static inline float narrow_rn(double value) { return (float)value; }
static inline double widen(float value) { return value; }
static inline bool is_less(float a, float b) { return a < b; }
static inline float add_rn(float a, float b) { return a + b; }
static inline float sub_rn(float a, float b) { return a - b; }
static inline float mul_rn(float a, float b) { return a * b; }
static inline float div_rn(float a, float b) { return a / b; }
static inline float sqrt_rn(float a) { return std::sqrt(a); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return std::sqrt(a); }
static inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }

template <class T> static inline T atomicMax(T* place, T value) {
    T before = *place;
    if (value > before) *place = value;
    return before;
}

template <class T> static inline T atomicAdd(T* place, T value) {
    T before = *place;
    *place = before + value;
    return before;
}

// ---- launches, with the arguments' addresses as for the driver ----

static void** addresses;

template <auto kernel> struct Call;

template <class... A, void (*kernel)(A...)> struct Call<kernel> {
    template <size_t... I> static void with(std::index_sequence<I...>) { kernel(*(A*)addresses[I]...); }
    static void run() { with(std::index_sequence_for<A...>()); }
};

static void run_grid(void (*call)(), unsigned blocks, unsigned rows, unsigned threads, void** arguments) {
    body = call;
    addresses = arguments;
    gridDim = {blocks, rows};
    blockDim = {threads, 1};
    for (unsigned y = 0; y < rows; ++y) {
        for (unsigned x = 0; x < blocks; ++x) {
            blockIdx = {x, y};
            run_block(threads);
        }
    }
}
