// LD_PRELOAD shim: below $FAULTY_ROOT the file system behaves as those of clusters do. $FAULTY is
// one of these, or several joined by +
//   nolocks     flock and fcntl locks fail with ENOSYS (Lustre mounted without -o flock)
//   nofallocate fallocate fails with EOPNOTSUPP (NFS before 4.2); glibc's posix_fallocate, which
//               then writes into every 4 KiB, is recorded in $FAULTY_LOG
//   estale      the first open of a file by a process fails with ESTALE, and so does the first read
//               after that (NFS: another host has replaced it)
//   ebusy       the first unlink of a name fails with EBUSY
//   silly       a file that is unlinked while this process has it open stays as .nfsXXXX until it
//               is closed; until then its directory cannot be removed (NFS)
//   late        a name that a process did not find stays missing for it for two seconds, though
//               another has made it (NFS: cached negative lookups)
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {
constexpr double kLateSeconds = 2;

template <class F>
F real(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}
bool is(const char* fault) {
  const char* value = getenv("FAULTY");
  if (!value) return false;
  std::string all = std::string("+") + value + "+";
  return all.find(std::string("+") + fault + "+") != std::string::npos;
}
std::string link_of(const std::string& path) {
  char text[4096];
  ssize_t n = readlink(path.c_str(), text, sizeof text);
  return n < 0 ? "" : std::string(text, n);
}
std::string of(int descriptor) { return link_of("/proc/self/fd/" + std::to_string(descriptor)); }
std::string absolute(int directory, const char* path) {
  if (!path) return "";
  if (*path == '/') return path;
  return (directory == AT_FDCWD ? link_of("/proc/self/cwd") : of(directory)) + "/" + path;
}
bool below_root(const std::string& path) {
  const char* root = getenv("FAULTY_ROOT");
  return root && !path.compare(0, strlen(root), root);
}
double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
std::mutex& mutex() {
  static auto* one = new std::mutex;
  return *one;
}
bool first_time(const std::string& what) {
  static auto* seen = new std::set<std::string>;
  std::lock_guard<std::mutex> guard(mutex());
  return seen->insert(what).second;
}
std::map<std::string, double>& missing() {
  static auto* names = new std::map<std::string, double>;
  return *names;
}
bool is_missing(const std::string& path) {
  std::lock_guard<std::mutex> guard(mutex());
  auto it = missing().find(path);
  return it != missing().end() && now() < it->second;
}
void looked_up(const std::string& path, bool absent) {
  std::lock_guard<std::mutex> guard(mutex());
  if (absent) missing().emplace(path, now() + kLateSeconds);
  else missing().erase(path);
}
void made(const std::string& path) {  // with what is below it
  std::lock_guard<std::mutex> guard(mutex());
  for (auto it = missing().begin(); it != missing().end();)
    it = it->first.compare(0, path.size(), path) ? std::next(it) : missing().erase(it);
}
template <class Call>
int lookup(int directory, const char* path, Call call) {
  std::string name = is("late") ? absolute(directory, path) : "";
  if (!below_root(name)) return call();
  if (is_missing(name)) return errno = ENOENT, -1;
  int result = call();
  int error = errno;
  looked_up(name, result < 0 && error == ENOENT);
  return errno = error, result;
}
template <class Call>
int open_file(int directory, const char* path, int flags, Call call) {
  if (is("late") && flags & O_CREAT) {
    int result = call();
    int error = errno;
    if (result >= 0) made(absolute(directory, path));
    return errno = error, result;
  }
  if (is("estale") && !(flags & (O_CREAT | O_DIRECTORY))) {
    std::string name = absolute(directory, path);
    struct stat facts;
    if (below_root(name) && !fstatat(directory, path, &facts, 0) && S_ISREG(facts.st_mode) &&
        first_time("open " + name))
      return errno = ESTALE, -1;
  }
  return lookup(directory, path, call);
}
bool stale_read(int descriptor) {
  if (!is("estale")) return false;
  std::string name = of(descriptor);
  return below_root(name) && first_time("read " + name) ? (errno = ESTALE, true) : false;
}
bool is_open(const std::string& path) {
  for (int descriptor = 0; descriptor < 256; descriptor++)
    if (of(descriptor) == path) return true;
  return false;
}
bool is_silly(const std::string& path) { return path.find("/.nfs") != std::string::npos; }
template <class Call>
int remove_file(int directory, const char* path, Call call) {
  std::string name = is("ebusy") || is("silly") ? absolute(directory, path) : "";
  struct stat facts;
  if (!below_root(name) || fstatat(directory, path, &facts, AT_SYMLINK_NOFOLLOW)) return call();
  if (is("ebusy") && !is_silly(name) && first_time("unlink " + name)) return errno = EBUSY, -1;
  if (!is("silly") || !is_open(name)) return call();
  if (is_silly(name)) return errno = EBUSY, -1;
  static int number = 0;
  std::string aside = name.substr(0, name.rfind('/')) + "/.nfs" + std::to_string(number++) + "." +
                      std::to_string(getpid());
  return renameat(directory, path, AT_FDCWD, aside.c_str());
}
int no_locks(int descriptor) {
  return is("nolocks") && below_root(of(descriptor)) ? (errno = ENOSYS, 1) : 0;
}
}  // namespace

#define OPEN(NAME)                                                                        \
  int NAME(const char* path, int flags, ...) {                                            \
    va_list more;                                                                         \
    va_start(more, flags);                                                                \
    mode_t mode = va_arg(more, mode_t);                                                   \
    va_end(more);                                                                         \
    static auto call = real<int (*)(const char*, int, ...)>(#NAME);                       \
    return open_file(AT_FDCWD, path, flags, [&] { return call(path, flags, mode); });     \
  }
#define OPENAT(NAME)                                                                      \
  int NAME(int directory, const char* path, int flags, ...) {                             \
    va_list more;                                                                         \
    va_start(more, flags);                                                                \
    mode_t mode = va_arg(more, mode_t);                                                   \
    va_end(more);                                                                         \
    static auto call = real<int (*)(int, const char*, int, ...)>(#NAME);                  \
    return open_file(directory, path, flags,                                              \
                     [&] { return call(directory, path, flags, mode); });                 \
  }
#define STAT(NAME, TYPE)                                                                  \
  int NAME(const char* path, TYPE* facts) noexcept {                                      \
    static auto call = real<int (*)(const char*, TYPE*)>(#NAME);                          \
    return lookup(AT_FDCWD, path, [&] { return call(path, facts); });                     \
  }
#define STATAT(NAME, TYPE)                                                                \
  int NAME(int directory, const char* path, TYPE* facts, int flags) noexcept {            \
    static auto call = real<int (*)(int, const char*, TYPE*, int)>(#NAME);                \
    return lookup(directory, path, [&] { return call(directory, path, facts, flags); });  \
  }
#define READDIR(NAME, TYPE)                                                               \
  TYPE* NAME(DIR* directory) {                                                            \
    static auto call = real<TYPE* (*)(DIR*)>(#NAME);                                      \
    TYPE* entry = call(directory);                                                        \
    if (!is("late")) return entry;                                                        \
    std::string folder = of(dirfd(directory)) + "/";                                      \
    while (entry && is_missing(folder + entry->d_name)) entry = call(directory);          \
    return entry;                                                                         \
  }
#define FALLOCATE(NAME, OFFSET)                                                           \
  int NAME(int descriptor, int mode, OFFSET offset, OFFSET length) {                      \
    static auto call = real<int (*)(int, int, OFFSET, OFFSET)>(#NAME);                    \
    if (is("nofallocate") && below_root(of(descriptor))) return errno = EOPNOTSUPP, -1;   \
    return call(descriptor, mode, offset, length);                                        \
  }
#define POSIX_FALLOCATE(NAME, OFFSET)                                                     \
  int NAME(int descriptor, OFFSET offset, OFFSET length) {                                \
    static auto call = real<int (*)(int, OFFSET, OFFSET)>(#NAME);                         \
    const char* log = getenv("FAULTY_LOG");                                               \
    if (is("nofallocate") && log && below_root(of(descriptor)))                           \
      if (FILE* file = fopen(log, "a")) {                                                 \
        fprintf(file, "%ld writes\n", (long)(length >> 12));                              \
        fclose(file);                                                                     \
      }                                                                                   \
    return call(descriptor, offset, length);                                              \
  }
#define FCNTL(NAME)                                                                       \
  int NAME(int descriptor, int command, ...) {                                            \
    va_list more;                                                                         \
    va_start(more, command);                                                              \
    void* value = va_arg(more, void*);                                                    \
    va_end(more);                                                                         \
    static auto call = real<int (*)(int, int, ...)>(#NAME);                               \
    bool locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||   \
                 command == F_OFD_SETLKW;                                                 \
    return locks && no_locks(descriptor) ? -1 : call(descriptor, command, value);         \
  }

extern "C" {
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
STAT(stat, struct stat)
STAT(stat64, struct stat64)
STAT(lstat, struct stat)
STAT(lstat64, struct stat64)
STATAT(fstatat, struct stat)
STATAT(fstatat64, struct stat64)
READDIR(readdir, struct dirent)
READDIR(readdir64, struct dirent64)
FALLOCATE(fallocate, off_t)
FALLOCATE(fallocate64, off64_t)
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)
FCNTL(fcntl)
FCNTL(fcntl64)

int access(const char* path, int mode) noexcept {
  static auto call = real<int (*)(const char*, int)>("access");
  return lookup(AT_FDCWD, path, [&] { return call(path, mode); });
}
int mkdir(const char* path, mode_t mode) noexcept {
  static auto call = real<int (*)(const char*, mode_t)>("mkdir");
  int result = call(path, mode);
  if (!result && is("late")) made(absolute(AT_FDCWD, path));
  return result;
}
int rename(const char* from, const char* to) noexcept {
  static auto call = real<int (*)(const char*, const char*)>("rename");
  int result = call(from, to);
  if (!result && is("late")) made(absolute(AT_FDCWD, to));
  return result;
}
ssize_t read(int descriptor, void* data, size_t size) {
  static auto call = real<ssize_t (*)(int, void*, size_t)>("read");
  return stale_read(descriptor) ? -1 : call(descriptor, data, size);
}
ssize_t pread64(int descriptor, void* data, size_t size, off64_t offset) {
  static auto call = real<ssize_t (*)(int, void*, size_t, off64_t)>("pread64");
  return stale_read(descriptor) ? -1 : call(descriptor, data, size, offset);
}
ssize_t preadv64v2(int descriptor, const struct iovec* data, int count, off64_t offset, int flags) {
  static auto call = real<ssize_t (*)(int, const struct iovec*, int, off64_t, int)>("preadv64v2");
  return stale_read(descriptor) ? -1 : call(descriptor, data, count, offset, flags);
}
int unlink(const char* path) noexcept {
  static auto call = real<int (*)(const char*)>("unlink");
  return remove_file(AT_FDCWD, path, [&] { return call(path); });
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  static auto call = real<int (*)(int, const char*, int)>("unlinkat");
  if (flags & AT_REMOVEDIR) return call(directory, path, flags);
  return remove_file(directory, path, [&] { return call(directory, path, flags); });
}
int close(int descriptor) {
  static auto call = real<int (*)(int)>("close");
  std::string name = is("silly") ? of(descriptor) : "";
  int result = call(descriptor);
  if (below_root(name) && is_silly(name) && !is_open(name)) unlink(name.c_str());
  return result;
}
int flock(int descriptor, int operation) noexcept {
  static auto call = real<int (*)(int, int)>("flock");
  return no_locks(descriptor) ? -1 : call(descriptor, operation);
}
}
