/* The mathematics that a program on a wsgrad CPU device may use; the functions are the C library's of the node.
 * What a processor has an instruction for is a builtin, because -ffreestanding hides the plain names from the compiler. */
#ifndef WSGRAD_MATH_H
#define WSGRAD_MATH_H

typedef float float_t;
typedef double double_t;

#define HUGE_VAL __builtin_huge_val()
#define HUGE_VALF __builtin_huge_valf()
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LOG10E 0.43429448190325182765
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_PI 0.63661977236758134308
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440

#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf(x)
#define isfinite(x) __builtin_isfinite(x)
#define isnormal(x) __builtin_isnormal(x)
#define signbit(x) __builtin_signbit(x)
#define isgreater(x, y) __builtin_isgreater(x, y)
#define isgreaterequal(x, y) __builtin_isgreaterequal(x, y)
#define isless(x, y) __builtin_isless(x, y)
#define islessequal(x, y) __builtin_islessequal(x, y)
#define islessgreater(x, y) __builtin_islessgreater(x, y)
#define isunordered(x, y) __builtin_isunordered(x, y)

#define WSGRAD_PURE __attribute__((const))
double acos(double) WSGRAD_PURE;
float acosf(float) WSGRAD_PURE;
double acosh(double) WSGRAD_PURE;
float acoshf(float) WSGRAD_PURE;
double asin(double) WSGRAD_PURE;
float asinf(float) WSGRAD_PURE;
double asinh(double) WSGRAD_PURE;
float asinhf(float) WSGRAD_PURE;
double atan(double) WSGRAD_PURE;
float atanf(float) WSGRAD_PURE;
double atanh(double) WSGRAD_PURE;
float atanhf(float) WSGRAD_PURE;
double cbrt(double) WSGRAD_PURE;
float cbrtf(float) WSGRAD_PURE;
double cos(double) WSGRAD_PURE;
float cosf(float) WSGRAD_PURE;
double cosh(double) WSGRAD_PURE;
float coshf(float) WSGRAD_PURE;
double erf(double) WSGRAD_PURE;
float erff(float) WSGRAD_PURE;
double erfc(double) WSGRAD_PURE;
float erfcf(float) WSGRAD_PURE;
double exp(double) WSGRAD_PURE;
float expf(float) WSGRAD_PURE;
double exp2(double) WSGRAD_PURE;
float exp2f(float) WSGRAD_PURE;
double expm1(double) WSGRAD_PURE;
float expm1f(float) WSGRAD_PURE;
double lgamma(double) WSGRAD_PURE;
float lgammaf(float) WSGRAD_PURE;
double log(double) WSGRAD_PURE;
float logf(float) WSGRAD_PURE;
double log10(double) WSGRAD_PURE;
float log10f(float) WSGRAD_PURE;
double log1p(double) WSGRAD_PURE;
float log1pf(float) WSGRAD_PURE;
double log2(double) WSGRAD_PURE;
float log2f(float) WSGRAD_PURE;
double logb(double) WSGRAD_PURE;
float logbf(float) WSGRAD_PURE;
double sin(double) WSGRAD_PURE;
float sinf(float) WSGRAD_PURE;
double sinh(double) WSGRAD_PURE;
float sinhf(float) WSGRAD_PURE;
double tan(double) WSGRAD_PURE;
float tanf(float) WSGRAD_PURE;
double tanh(double) WSGRAD_PURE;
float tanhf(float) WSGRAD_PURE;
double tgamma(double) WSGRAD_PURE;
float tgammaf(float) WSGRAD_PURE;
double ceil(double) WSGRAD_PURE;
float ceilf(float) WSGRAD_PURE;
double fabs(double) WSGRAD_PURE;
float fabsf(float) WSGRAD_PURE;
double floor(double) WSGRAD_PURE;
float floorf(float) WSGRAD_PURE;
double nearbyint(double) WSGRAD_PURE;
float nearbyintf(float) WSGRAD_PURE;
double rint(double) WSGRAD_PURE;
float rintf(float) WSGRAD_PURE;
double round(double) WSGRAD_PURE;
float roundf(float) WSGRAD_PURE;
double roundeven(double) WSGRAD_PURE;
float roundevenf(float) WSGRAD_PURE;
double sqrt(double) WSGRAD_PURE;
float sqrtf(float) WSGRAD_PURE;
double trunc(double) WSGRAD_PURE;
float truncf(float) WSGRAD_PURE;
double atan2(double, double) WSGRAD_PURE;
float atan2f(float, float) WSGRAD_PURE;
double fdim(double, double) WSGRAD_PURE;
float fdimf(float, float) WSGRAD_PURE;
double fmod(double, double) WSGRAD_PURE;
float fmodf(float, float) WSGRAD_PURE;
double hypot(double, double) WSGRAD_PURE;
float hypotf(float, float) WSGRAD_PURE;
double nextafter(double, double) WSGRAD_PURE;
float nextafterf(float, float) WSGRAD_PURE;
double pow(double, double) WSGRAD_PURE;
float powf(float, float) WSGRAD_PURE;
double remainder(double, double) WSGRAD_PURE;
float remainderf(float, float) WSGRAD_PURE;
double copysign(double, double) WSGRAD_PURE;
float copysignf(float, float) WSGRAD_PURE;
double fmax(double, double) WSGRAD_PURE;
float fmaxf(float, float) WSGRAD_PURE;
double fmin(double, double) WSGRAD_PURE;
float fminf(float, float) WSGRAD_PURE;
double fma(double, double, double) WSGRAD_PURE;
float fmaf(float, float, float) WSGRAD_PURE;
double ldexp(double, int) WSGRAD_PURE;
float ldexpf(float, int) WSGRAD_PURE;
double scalbn(double, int) WSGRAD_PURE;
float scalbnf(float, int) WSGRAD_PURE;
int ilogb(double) WSGRAD_PURE;
int ilogbf(float) WSGRAD_PURE;
long lrint(double) WSGRAD_PURE;
long lrintf(float) WSGRAD_PURE;
long lround(double) WSGRAD_PURE;
long lroundf(float) WSGRAD_PURE;
long long llrint(double) WSGRAD_PURE;
long long llrintf(float) WSGRAD_PURE;
long long llround(double) WSGRAD_PURE;
long long llroundf(float) WSGRAD_PURE;
double frexp(double, int *);
float frexpf(float, int *);
double modf(double, double *);
float modff(float, float *);
void sincos(double, double *, double *);
void sincosf(float, float *, float *);

#define ceil(x) __builtin_ceil(x)
#define ceilf(x) __builtin_ceilf(x)
#define fabs(x) __builtin_fabs(x)
#define fabsf(x) __builtin_fabsf(x)
#define floor(x) __builtin_floor(x)
#define floorf(x) __builtin_floorf(x)
#define nearbyint(x) __builtin_nearbyint(x)
#define nearbyintf(x) __builtin_nearbyintf(x)
#define rint(x) __builtin_rint(x)
#define rintf(x) __builtin_rintf(x)
#define round(x) __builtin_round(x)
#define roundf(x) __builtin_roundf(x)
#define sqrt(x) __builtin_sqrt(x)
#define sqrtf(x) __builtin_sqrtf(x)
#define trunc(x) __builtin_trunc(x)
#define truncf(x) __builtin_truncf(x)
#define copysign(x, y) __builtin_copysign(x, y)
#define copysignf(x, y) __builtin_copysignf(x, y)
#define fmax(x, y) __builtin_fmax(x, y)
#define fmaxf(x, y) __builtin_fmaxf(x, y)
#define fmin(x, y) __builtin_fmin(x, y)
#define fminf(x, y) __builtin_fminf(x, y)
#define fma(x, y, z) __builtin_fma(x, y, z)
#define fmaf(x, y, z) __builtin_fmaf(x, y, z)

#undef WSGRAD_PURE
#endif
