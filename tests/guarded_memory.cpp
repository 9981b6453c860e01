// Preloaded into a process: tensors on the CPU end at a page that can neither be read nor written,
// so a kernel that goes past the end of a tensor stops at once, and so does one that uses a tensor
// after it was freed. PyTorch allocates tensors with posix_memalign.
//
//   a page with their number | pages with the tensor at their end | an inaccessible page

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <mutex>
#include <sys/mman.h>

namespace {

constexpr std::size_t PAGE = 4096;
constexpr std::size_t ALIGNMENT = 16;                  // kernels load so many bytes at once
constexpr std::size_t RESERVED = std::size_t(1) << 42; // addresses, none is used twice

std::mutex mutex;
char *first = nullptr, *next = nullptr;

char* take(std::size_t num_pages) {
    std::lock_guard<std::mutex> lock(mutex);
    if (first == nullptr) {
        void* reserved =
            mmap(nullptr, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (reserved == MAP_FAILED) std::abort();
        first = next = static_cast<char*>(reserved);
    }
    char* own = next;
    next += num_pages * PAGE;
    if (next > first + RESERVED) std::abort();
    return own;
}

} // namespace

extern "C" int posix_memalign(void** out, std::size_t, std::size_t size) {
    const std::size_t num_pages = (size + PAGE - 1) / PAGE;
    char* header = take(num_pages + 2);
    if (mprotect(header, (num_pages + 1) * PAGE, PROT_READ | PROT_WRITE) != 0) return ENOMEM;
    *reinterpret_cast<std::size_t*>(header) = num_pages;
    const std::size_t used = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    *out = header + (num_pages + 1) * PAGE - used;
    return 0;
}

extern "C" void free(void* memory) {
    static void (*plain)(void*) = nullptr;
    if (plain == nullptr) plain = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_NEXT, "free"));
    char* own = static_cast<char*>(memory);
    if (first == nullptr || own < first || own >= first + RESERVED) return plain(memory);
    const std::uintptr_t page = reinterpret_cast<std::uintptr_t>(own) / PAGE * PAGE;
    char* header = reinterpret_cast<char*>(page) - PAGE; // a tensor begins in its first page
    const std::size_t num_bytes = (*reinterpret_cast<std::size_t*>(header) + 1) * PAGE;
    madvise(header, num_bytes, MADV_DONTNEED);
    mprotect(header, num_bytes, PROT_NONE);
}
